"""The ten best candidates as a table: what is foreseen of each, and why it lost."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.text import Text

from flowrun.engine.compile import longest_equal_step
from flowrun.launcher.place.outcome import Outcome
from flowrun.launcher.place.placement_search import SHOWN, PlacementResult
from flowrun.launcher.terminal.console import plain_table
from flowrun.launcher.terminal.units import seconds, size

_LACKING = 3  # candidates that lack memory, of the ten, at most
_NUMBERS = ("", "a step", "~", "memory", "sent", "bubble")
# What a step is spent on -> how it is said of a candidate that spends more on it.
_SPENT = {"repeated": "recomputation", "bubble": "bubble", "bytes": "bytes", "work": "work"}
_NOTE = (
    "~: from plans of few of the model's blocks (docs/how_to/placement_search.md), as are the"
    " memory, bytes and bubble of rows without a whole plan. "
)


def table(found: PlacementResult) -> RenderableType:
    """The winner first.  Figures keep their width; what is said of a candidate, and why it lost,
    take as many lines as the console needs.
    """
    best = found.best
    assert best is not None, "place() raises where nothing fits"
    estimated = any(outcome.extrapolated for outcome in found.outcomes)
    headings = [name for name in _NUMBERS if estimated or name != "~"]
    rows: list[list[str | Text]] = []
    for number, outcome in enumerate(ten(found), 1):
        figures = {"": str(number), **_figures(outcome)}
        said = Text(f"{outcome.candidate}\n").append(f"- {why(outcome, best)}", "dim")
        rows.append([*(figures[heading] for heading in headings), said])
    columns = (*headings, "placement, and why not")
    shown = plain_table("", columns, rows, right=headings, whole=headings)
    notes = f"{_NOTE if estimated else ''}{found.coverage}"
    return Group(Text("placements", "bold"), shown, Text(notes, "dim"))


def ten(found: PlacementResult) -> list[Outcome]:
    """The best, then those that fit, planned whole before others; then the fastest few of those
    that lack memory.
    """
    best = found.best
    fit = [outcome for outcome in found.outcomes if outcome.fits and outcome is not best]
    lacking = [outcome for outcome in found.outcomes if outcome.missing][:_LACKING]
    fit = sorted(fit, key=lambda outcome: outcome.extrapolated)[: SHOWN - 1 - len(lacking)]
    return [*([best] if best else []), *fit, *lacking]


def why(outcome: Outcome, best: Outcome) -> str:
    """Why a candidate is not the best one."""
    if outcome is best:
        return "the best"
    if outcome.missing:
        return f"rank {outcome.rank} (stage {outcome.stage}) lacks {size(outcome.missing)}"
    if outcome.extrapolated and best.estimate:
        best = best.estimate  # like with like
    slower = outcome.step_s / best.step_s - 1
    one, other = asdict(outcome.spent), asdict(best.spent)
    most = max(_SPENT, key=lambda name: one[name] - other[name])
    if outcome.step_s <= longest_equal_step(best.step_s):
        return "as fast, but not planned whole" if outcome.extrapolated else "as fast, no simpler"
    return f"{slower:.1%} slower: {_SPENT[most]} +{seconds(one[most] - other[most])}"


def _figures(outcome: Outcome) -> dict[str, str]:
    estimate = outcome if outcome.extrapolated else outcome.estimate
    return {
        "a step": "" if outcome.extrapolated else seconds(outcome.step_s),
        "~": f"~{seconds(estimate.step_s)}" if estimate else "",
        "memory": size(outcome.bytes),
        "sent": size(outcome.sent_bytes),
        "bubble": f"{max(0.0, outcome.bubble):.0%}",
    }
