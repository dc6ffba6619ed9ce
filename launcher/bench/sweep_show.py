"""Rows of a sweep -> what a person sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowrun.launcher.bench.suite import Suite
from flowrun.launcher.bench.sweep import TrialResult, sums

HEADINGS = ("foreseen ms", "measured", "ratio", "foreseen MB", "measured", "ratio", "behind")


def table(suite: Suite, measured: Sequence[TrialResult]) -> RenderableType:
    """A block a model and number of ranks, the fastest first; the pick is marked."""
    parts: list[RenderableType] = [Text(f"{suite.name}: {suite.note}", "bold")]
    for (name, ranks), group in groupby(
        measured, key=lambda row: (row.trial.experiment, row.trial.ranks)
    ):
        title = suite.experiments[name].title or name
        rows = Table(title=f"{title}, {ranks} ranks", title_justify="left", box=None)
        rows.add_column("", justify="right")
        rows.add_column("layout")
        for heading in HEADINGS:
            rows.add_column(heading, justify="right", no_wrap=True)
        for row in group:
            rows.add_row(*_cells(row), style="bold" if row.trial.picked else "")
        parts.append(rows)
    if any(not row.problem for row in measured):
        parts.append(Text(_write_verdict(suite, measured), "dim"))
    return Group(*parts)


def _cells(row: TrialResult) -> list[str]:
    name = f"{row.trial.candidate}{'  <- auto' if row.trial.picked else ''}"
    if row.problem:
        return ["", name, row.problem]
    return [
        str(row.place),
        name,
        f"{row.foreseen_s * 1e3:.1f}",
        f"{row.measured_s * 1e3:.1f}",
        f"{row.foreseen_s / row.measured_s:.2f}",
        f"{row.foreseen_bytes / 1e6:.1f}",
        f"{row.measured_bytes / 1e6:.1f}",
        f"{row.foreseen_bytes / row.measured_bytes:.2f}",
        f"{row.behind:.1%}",
    ]


def _write_verdict(suite: Suite, measured: Sequence[TrialResult]) -> str:
    found = sums(measured)
    more = ""
    if (sweep := suite.sweep) and sweep.finals:
        more = f", of the fastest of each {sweep.finals} x {sweep.final_s:g} s more"
    return (
        f"ms: of a step, the median of {suite.rounds} x {suite.steps - suite.warmup}{more}."
        " MB: live tensors of the rank that holds most. behind: the fastest layout measured."
        f" Foreseen is off by {found.time_off:.0%} in time and {found.memory_off:.0%} in memory"
        f" (medians); the worst pick is {found.worst:.1%} behind."
    )
