"""The ten best candidates as a table: what is foreseen of each, and why it lost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowrun.launcher.auto.outcome import Outcome, Spent, as_good_as
from flowrun.launcher.auto.search import SHOWN, Found
from flowrun.launcher.auto.space import Branch
from flowrun.launcher.quantities import seconds, size

_FASTER = 3  # candidates that lack memory, of the ten, at most
_NUMBERS = {"", "ms", "memory", "sent", "bubble"}
# What a step is spent on -> how it is said of a candidate that spends more on it.
_SPENT = {
    "repeated": "recomputation",
    "bubble": "bubble",
    "bytes": "bytes",
    "work": "work",
}


def table(found: Found) -> RenderableType:
    """The winner first."""
    best = found.best
    assert best is not None, "place() raises where nothing fits"
    title = Text("placements", "bold")
    rows = Table(box=None, pad_edge=False)
    for heading in ("", "placement", "micro-batches", "ZeRO", "recomputes", "ms", "memory"):
        rows.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
    for heading in ("sent", "bubble"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("why not")
    for number, outcome in enumerate(ten(found), 1):
        rows.add_row(str(number), *_cells(outcome), why(outcome, best))
    return Group(title, rows, Text(coverage(found), "dim"))


def summary(found: Found) -> str:
    """The winner in a line."""
    best = found.best
    assert best is not None, "place() raises where nothing fits"
    return (
        f"placed: {best.candidate}; foreseen {seconds(best.step_s)} a step,"
        f" {size(best.bytes)} a rank. {coverage(found)}"
    )


def ten(found: Found) -> list[Outcome]:
    """The best, then by time; of those that lack memory the fastest few."""
    best = found.best
    fit = [outcome for outcome in found.outcomes if outcome.fits and outcome is not best]
    lacking = [outcome for outcome in found.outcomes if outcome.missing][:_FASTER]
    others = sorted((*fit[: SHOWN - 1 - len(lacking)], *lacking), key=lambda o: o.step_s)
    return [best, *others] if best else others


def why(outcome: Outcome, best: Outcome) -> str:
    """Why a candidate is not the best one."""
    if outcome is best:
        return "the best"
    if outcome.missing:
        return f"rank {outcome.rank} (stage {outcome.stage}) lacks {size(outcome.missing)}"
    if outcome.extrapolated and best.told:
        best = best.told  # like with like
    slower = outcome.step_s / best.step_s - 1
    more = {name: _more(outcome.spent, best.spent, name) for name in _SPENT}
    most = max(more, key=lambda name: more[name])
    if outcome.step_s <= as_good_as(best.step_s):
        return "as fast, but no simpler"
    return f"{slower:.1%} slower: {_SPENT[most]} +{seconds(more[most])}"


def _more(one: Spent, other: Spent, name: str) -> float:
    return float(getattr(one, name)) - float(getattr(other, name))


def coverage(found: Found) -> str:
    """What was planned and what was not, and what that proves."""
    planned = sum(not outcome.problem for outcome in found.outcomes)
    failed = len(found.outcomes) - planned
    text = f"{planned} candidates planned"
    text += f", {failed} cannot be compiled" if failed else ""
    text += f"; {found.skipped} groups are not looked at" if found.skipped else ""
    if found.left:
        text += f"; {found.left} groups or candidates left out: their least time or memory is more"
    best = found.best
    if not found.unseen or best is None:
        return f"{text}. No other is faster.{_told(best)}"
    gap = max(0.0, best.step_s / found.unseen_s - 1) if found.unseen_s else 0.0
    return (
        f"{text}; {found.unseen} are not planned (auto.plans): none takes less than"
        f" {seconds(found.unseen_s)}, so that the best is within {gap:.0%};"
        f" {seconds(found.expected_s)} and more are expected.{_told(best)}"
    )


def _told(best: Outcome | None) -> str:
    """Of a winner that few blocks told of first."""
    if not best or not best.told:
        return ""
    return (
        " Figures with ~ are told by plans of few blocks (docs/placement_search.md); of the best"
        f" these told {seconds(best.told.step_s)} and {size(best.told.bytes)},"
        f" its whole plan {seconds(best.step_s)} and {size(best.bytes)}."
    )


def _cells(outcome: Outcome) -> Sequence[str]:
    candidate = outcome.candidate
    branch: Branch = candidate.branch
    in_flight = "" if candidate.in_flight == "auto" else f" {candidate.in_flight}"
    kept = f" but {', '.join(candidate.keep)}" if candidate.keep else ""
    return (
        str(branch),
        f"{branch.micro_batches}{in_flight}",
        str(candidate.zero or ""),
        " ".join(candidate.recompute) + kept,
        f"{'~' if outcome.extrapolated else ''}{outcome.step_s * 1e3:,.1f}",
        size(outcome.bytes),
        size(outcome.sent_bytes),
        f"{max(0.0, outcome.bubble):.0%}",
    )
