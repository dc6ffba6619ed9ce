"""The story of published tables: each row planned and rehearsed, none of it run; then a table a
table, files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.bench.bench import PLOT, show_files, write_results
from flowrun.launcher.bench.foreseen.published import UNITS, Foreseen, PublishedTable
from flowrun.launcher.bench.foreseen.score import Score, ScoredFigure, score
from flowrun.launcher.bench.foreseen.show_tables import draw, result
from flowrun.launcher.place.settle import job_to_plan
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe


def foresee(
    suite: Foreseen, folder: Path, console: Console, config_dir: str | None = None
) -> tuple[ScoredFigure, ...]:
    """Plan every row of the suite, print each table to `console` as it is done, and fill `folder`.

    Raises RecipeError if a row does not compose (nothing was planned).  A row that cannot be
    planned is a line with a problem.
    """
    recipes = {
        row.name: load(list(row.overrides), config_dir)
        for table in suite.tables
        for row in table.rows
    }
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[ScoredFigure] = []
    scores: list[Score] = []
    for table in suite.tables:
        for place, row in enumerate(table.rows, start=1):
            begun = time.monotonic()
            lines += _plan_figures(table, row.name, dict(row.figures), recipes[row.name])
            line = f"{table.name} {place}/{len(table.rows)}  {row.name}"
            console.print(f"{line}  {time.monotonic() - begun:.0f} s", style="dim", highlight=False)
        mine = [score(suite, table, unit, lines) for unit in table.units]
        scores += filter(None, mine)
        console.print(result(suite, table, lines, scores))
        written = [{**asdict(line), "error": line.error} for line in lines]
        scored = [asdict(each) for each in scores]
        write_results(folder, {"suite": asdict(suite), "lines": written, "scores": scored})
    show_files(console, folder, draw(suite, lines, folder / PLOT))
    return tuple(lines)


def _plan_figures(
    table: PublishedTable, row: str, figures: Mapping[str, float], recipe: Recipe
) -> Iterator[ScoredFigure]:
    """A line for each published figure of the row."""
    found, problem = None, ""
    try:
        found = job_to_plan(recipe)[0].training
    except (FlowrunError, MemoryError, RuntimeError) as error:
        known = isinstance(error, FlowrunError | MemoryError)
        if not known and "can't allocate memory" not in str(error):  # not even to name the bytes
            raise
        problem = " ".join(str(error).split())
    for unit, published in figures.items():
        yield ScoredFigure(
            table=table.name,
            row=row,
            unit=unit,
            published=published,
            foreseen=UNITS[unit][1](recipe, found) if found else None,
            problem=problem,
        )
