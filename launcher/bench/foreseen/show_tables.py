"""Lines of published tables -> what a person sees: a table each; published against foreseen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from flowrun.launcher.bench.foreseen.published import UNITS, Foreseen, PublishedTable
from flowrun.launcher.bench.foreseen.score import Score, ScoredFigure, points
from flowrun.launcher.terminal.console import plain_table

POINT, EXACT = "#3b6ea5", "#b9bec6"


def result(
    suite: Foreseen, table: PublishedTable, lines: Sequence[ScoredFigure], scores: Sequence[Score]
) -> RenderableType:
    """Show a table of the suite: for each of its lines and units the published and the foreseen
    figure and the error; then the scores.
    """
    found = {(line.row, line.unit): line for line in lines}
    problems: dict[str, str] = {}
    headings = ["", *(h for unit in table.units for h in (UNITS[unit][0], "foreseen", "off"))]
    rows: list[list[RenderableType]] = []
    for row in table.rows:
        mine = [found.get((row.name, unit)) for unit in table.units]
        cells = (cell for line in mine for cell in _cells(suite, line))
        rows.append([row.name.partition("/")[2], *cells])
        problems.update((line.row, line.problem) for line in mine if line and line.problem)
    title = Text.assemble("\n", (table.title, "bold"), (f"   {table.source}", "dim"))
    said = (Text(f"{row}: {problem}", "yellow") for row, problem in problems.items())
    verdicts = [_verdict(suite, each) for each in scores if each.table == table.name]
    grid = plain_table("", headings, rows, right=headings[1:], whole=headings)
    return Group(title, grid, *(Padding(each, (0, 0, 0, 2)) for each in said), *verdicts)


def _cells(suite: Foreseen, line: ScoredFigure | None) -> list[RenderableType]:
    if line is None:
        return ["", "", ""]
    if line.foreseen is None or line.error is None:
        return [_short(line.published), Text("not planned", "yellow"), ""]
    far = abs(line.error) > suite.error_at_most
    off = Text(f"{line.error:+.0%}", "red" if far else "")
    return [_short(line.published), _short(line.foreseen), off]


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
    word, colour = {True: (" yes)", "green"), False: (" no)", "red"), None: (")", "dim")}[holds]
    return text + word, colour


def _short(value: float) -> str:
    """Three digits or more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 100 else f"{value:.3g}"


def draw(suite: Foreseen, lines: Sequence[ScoredFigure], file: Path) -> bool:
    """Draw a panel a table and unit to `file`, both axes logarithmic.  The diagonal is where both
    figures are the same, the band the suite's bound on the median error.

    Return False if nothing was foreseen, or if matplotlib (extra `plot`) is not installed.
    """
    panels = [
        (f"{table.title}\n{UNITS[unit][0]}", mine)
        for table in suite.tables
        for unit in table.units
        if (mine := points(lines, table.name, unit))
    ]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not panels:
        return False
    columns = min(3, len(panels))
    height = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.9 * height), layout="constrained")
    for k, (title, mine) in enumerate(panels):
        axes = figure.add_subplot(height, columns, k + 1, title=title)
        ends = [min(map(min, mine)) / 1.2, max(map(max, mine)) * 1.2]
        low, high = ([end * (1 + sign * suite.error_at_most) for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, low, high, color=EXACT, alpha=0.4, linewidth=0)
        axes.plot(ends, ends, color=EXACT, linewidth=1)
        axes.plot(*zip(*mine, strict=True), "o", color=POINT, markersize=4)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="published", ylabel="foreseen")
    figure.savefig(file)
    return True
