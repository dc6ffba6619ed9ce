"""Lines of a published table -> what a person sees."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from flowrun.launcher.bench.foreseen.figures import UNITS
from flowrun.launcher.bench.foreseen.published import Foreseen, PublishedTable
from flowrun.launcher.bench.foreseen.score import Score, ScoredFigure


def result(
    suite: Foreseen, table: PublishedTable, lines: Sequence[ScoredFigure], scores: Sequence[Score]
) -> RenderableType:
    """Show a table of the suite: for each of its lines and units the published and the foreseen
    figure and the error; then the scores.
    """
    grid = Grid(box=None, pad_edge=False)
    grid.add_column("", no_wrap=True)
    for unit in table.units:
        for heading in (UNITS[unit][0], "foreseen", "off"):
            grid.add_column(heading, justify="right", no_wrap=True)
    found = {(line.row, line.unit): line for line in lines}
    problems: list[RenderableType] = []
    for row in table.rows:
        mine = [found.get((row.name, unit)) for unit in table.units]
        grid.add_row(
            row.name.partition("/")[2], *(cell for line in mine for cell in _cells(suite, line))
        )
        problem = next((line.problem for line in mine if line and line.problem), "")
        if problem:
            problems.append(Padding(Text(f"{row.name}: {problem}", "yellow"), (0, 0, 0, 2)))
    title = Text.assemble("\n", (table.title, "bold"), (f"   {table.source}", "dim"))
    verdicts = [_verdict(suite, each) for each in scores if each.table == table.name]
    return Group(title, grid, *problems, *verdicts)


def _cells(suite: Foreseen, line: ScoredFigure | None) -> list[RenderableType]:
    if line is None:
        return ["", "", ""]
    if line.foreseen is None or line.error is None:
        return [_short(line.published), Text("not planned", "yellow"), ""]
    near = abs(line.error) <= suite.error_at_most
    return [
        _short(line.published),
        _short(line.foreseen),
        Text(f"{line.error:+.0%}", "" if near else "red"),
    ]


def _verdict(suite: Foreseen, found: Score) -> RenderableType:
    rank = "-" if found.rank is None else f"{found.rank:.3f}"
    return Text.assemble(
        (f"{UNITS[found.unit][0]}, {found.rows} rows: ", "bold"),
        f"rank correlation {rank}",
        _bound(f" (>= {suite.rank_at_least:.2f}", found.ranks_hold),
        f", median error {found.error:.1%}",
        _bound(f" (<= {suite.error_at_most:.0%}", found.errors_hold),
    )


def _bound(text: str, holds: bool | None) -> tuple[str, str]:
    """Say in words whether a bound holds, also for those who see no colours."""
    said = {True: " yes)", False: " no)", None: ")"}[holds]
    return text + said, {True: "green", False: "red", None: "dim"}[holds]


def _short(value: float) -> str:
    """Three digits or more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 100 else f"{value:.3g}"
