"""Lines -> published against foreseen, a panel a table and unit, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from flowrun.launcher.bench.foreseen.figures import UNITS
from flowrun.launcher.bench.foreseen.published import Foreseen
from flowrun.launcher.bench.foreseen.score import ScoredFigure

POINT, EXACT = "#3b6ea5", "#b9bec6"


def draw(suite: Foreseen, lines: Sequence[ScoredFigure], file: Path) -> bool:
    """Draw published against foreseen figures (`lines`) to `file`.  The diagonal is where both are
    the same, the band the suite's bound on the median error.

    Return False if nothing was foreseen, or if matplotlib (extra `plot`) is not installed.
    """
    panels = [
        (table, unit, mine)
        for table in suite.tables
        for unit in table.units
        if (mine := _points(lines, table.name, unit))
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
    grid = list(figure.subplots(height, columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (table, unit, points) in zip(grid, panels, strict=False):
        low = min(map(min, points)) / 1.2
        high = max(map(max, points)) * 1.2
        near = suite.error_at_most
        axes.fill_between(
            [low, high],
            [low * (1 - near), high * (1 - near)],
            [low * (1 + near), high * (1 + near)],
            color=EXACT,
            alpha=0.4,
            linewidth=0,
        )
        axes.plot([low, high], [low, high], color=EXACT, linewidth=1)
        axes.plot(*zip(*points, strict=True), "o", color=POINT, markersize=4)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set_title(f"{table.title}\n{UNITS[unit][0]}", fontsize=8)
        axes.set_xlabel("published", fontsize=8)
        axes.set_ylabel("foreseen", fontsize=8)
        axes.tick_params(which="both", labelsize=7)
    figure.savefig(file)
    return True


def _points(lines: Sequence[ScoredFigure], table: str, unit: str) -> list[tuple[float, float]]:
    return [
        (line.published, line.foreseen)
        for line in lines
        if (line.table, line.unit) == (table, unit) and line.foreseen is not None
    ]
