"""Lines -> what a person sees: a table, and bars of step time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flowrun.launcher.bench.results import ResultLine
from flowrun.launcher.bench.suite import FLOWRUN, MODES, Suite
from flowrun.launcher.report.bars import BarPanel, draw_bars

OURS, THEIRS = "#3b6ea5", "#b9bec6"
# Headings and widths.  A ratio and an efficiency share a column, and so do their bounds.
COLUMNS = {
    "ms": 6,
    "least": 6,
    "plan": 6,
    "share": 5,
    "bound": 11,
    "MB": 5,
    "sent MB": 7,
    "losses": 6,
}


def table(suite: Suite, found: Sequence[ResultLine]) -> RenderableType:
    """A block an experiment: flowrun with its efficiency, its peers with flowrun's share of their
    time.  100 columns are enough.
    """
    names = max((len(_name(line)) for line in found), default=0)
    title = Text(f"{suite.name}: {suite.note}" if suite.note else suite.name, "bold")
    parts: list[RenderableType] = [
        title,
        _row(names, "", *(Text(each, "bold") for each in COLUMNS)),
    ]
    block = None
    for line in found:
        if block != (line.experiment, line.mode):
            block = line.experiment, line.mode
            parts.append(_title(line))
        parts.append(_row(names, *_cells(line)))
        if line.problem:
            parts.append(Padding(Text(line.problem, "yellow"), (0, 0, 0, 4)))
    return Group(*parts, Text(), Text(legend(suite), "dim"))


def legend(suite: Suite) -> str:
    runs = f"{suite.rounds} run{'s' * (suite.rounds != 1)}"
    return (
        f"ms: of a step, the median of {runs}, each without its first {suite.warmup}; "
        "least: of all; plan: what flowrun's plan foresees. share: flowrun's part of the peer's "
        "time, the median of the rounds' own; "
        "of flowrun, its efficiency: one rank / (ranks x time). MB: of the rank that takes most, "
        "without what it had before training. sent MB: of all ranks in a step. losses: how far the "
        f"peer's are off in any step, relative; allowed is {suite.loss_tolerance:.0e}."
    )


def _title(ours: ResultLine) -> Text:
    title = f"{ours.title}, {ours.mode}" if ours.mode != MODES[0] else ours.title
    speed = f"   {ours.per_s:,.0f} {ours.unit}/s" if ours.per_s is not None else ""
    share = ours.utilisation
    of_peak = f", model FLOPs {share:.1%} of the peak" if share is not None else ""
    return Text.assemble((title, "bold"), (speed + of_peak, "dim"))


def _row(names: int, *cells: RenderableType) -> Table:
    """Make a row of the table: all have the same widths."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=names)
    for width in COLUMNS.values():
        grid.add_column(width=width, justify="right", no_wrap=True)
    grid.add_row(*cells)
    return grid


def _name(line: ResultLine) -> str:
    return f"  {line.side}, {line.setting}" if line.setting else f"  {line.side}"


def _cells(line: ResultLine) -> list[RenderableType]:
    bold = "bold" if line.side == FLOWRUN else ""
    name = Text(_name(line), bold)
    if line.median_s is None:
        return [name, Text("failed", "yellow") if line.problem else Text("-", "dim")]
    share = "" if line.efficiency is None else f"{line.efficiency:.0%}"
    apart = "" if line.losses_apart is None else f"{line.losses_apart:.0e}"
    return [
        name,
        Text(_short(line.median_s, 1e3), bold),
        _short(line.min_s, 1e3),
        _short(line.foreseen_s, 1e3),
        Text(
            share if line.ratio is None else f"{line.ratio:.2f}",
            {True: "green", False: "red", None: ""}[line.holds],
        ),
        _bound(line),
        _short(line.peak_bytes, 1e-6),
        _short(line.sent_bytes, 1e-6),
        Text(apart, "" if line.agree else "bold red"),
    ]


def _short(value: float | None, unit: float) -> str:
    """Three digits, or all in front of the point, of a number in units of the table."""
    if value is None:
        return ""
    return f"{value * unit:.0f}" if value * unit >= 100 else f"{value * unit:.1f}"


def _bound(line: ResultLine) -> str:
    """The bound, and whether it holds, for those who see no colours too."""
    if line.at_most is not None:
        text = f"<= {line.at_most:.2f}"
    elif line.at_least is not None:
        text = f">= {line.at_least:.0%}"
    else:
        return ""
    return text + {True: " yes", False: " no ", None: "    "}[line.holds]


def draw(suite: Suite, found: Sequence[ResultLine], file: Path) -> bool:
    """Draw a bar for each line of `found` to `file`, and a mark on flowrun's bar where the bounds
    of the suite want it to end.  Return False if nothing ran, or without matplotlib.
    """
    ran = [line for line in found if line.median_s is not None]
    colours = [OURS if line.side == FLOWRUN else THEIRS for line in ran]
    wanted = [wanted_s(line, ran) if line.side == FLOWRUN else None for line in ran]
    times = BarPanel(
        "step time (ms); red: the bound",
        [("", colours, [(line.median_s or 0) * 1e3 for line in ran])],
        [None if each is None else each * 1e3 for each in wanted],
    )
    peaks = [(line.peak_bytes or 0) / 1e6 for line in ran]
    memory = BarPanel("memory of a rank (MB)", [("", colours, peaks)])
    title = f"{suite.name}: {suite.note}" if suite.note else suite.name
    return draw_bars(file, [_label(line) for line in ran], (times, memory), title)


def wanted_s(ours: ResultLine, found: Sequence[ResultLine]) -> float | None:
    """Seconds that all bounds on the peers of a line of flowrun leave it; None without bounds."""
    limits = [
        line.median_s * line.at_most
        for line in found
        if (line.experiment, line.mode) == (ours.experiment, ours.mode)
        and line.median_s is not None
        and line.at_most is not None
    ]
    return min(limits, default=None)


def _label(line: ResultLine) -> str:
    """The experiment stands with flowrun's bar."""
    if line.side == FLOWRUN:
        mode = "" if line.mode == MODES[0] else f", {line.mode}"
        return f"{line.title}{mode}   flowrun"
    return f"{line.side}, {line.setting}" if line.setting else line.side
