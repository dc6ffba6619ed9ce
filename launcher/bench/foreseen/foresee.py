"""The story of published tables: each row planned and rehearsed, none of it run; then a table a
table, files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.bench.foreseen.figures import UNITS
from flowrun.launcher.bench.foreseen.planning import plan_row
from flowrun.launcher.bench.foreseen.plot_tables import draw
from flowrun.launcher.bench.foreseen.published import Foreseen, PublishedRow, PublishedTable
from flowrun.launcher.bench.foreseen.score import Score, ScoredFigure, score
from flowrun.launcher.bench.foreseen.show_tables import result
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.report import strict
from flowrun.launcher.terminal.console import NO_PLOT

FILE, PLOT = "bench.json", "bench.svg"


def foresee(
    suite: Foreseen, folder: Path, console: Console, config_dir: str | None = None
) -> tuple[ScoredFigure, ...]:
    """Plan every row of the suite, print each table to `console` as it is done, and fill `folder`.

    config_dir: the user's own groups.
    Raises RecipeError if a row does not compose (nothing was planned).  A row that cannot be
    planned is a line with a problem.
    """
    for table in suite.tables:
        for row in table.rows:
            load(list(row.overrides), config_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[ScoredFigure] = []
    scores: list[Score] = []
    for table in suite.tables:
        for place, row in enumerate(table.rows, start=1):
            begun = time.monotonic()
            found = tuple(_foreseen(table, row, config_dir))
            lines += found
            line = f"{table.name} {place}/{len(table.rows)}  {row.name}"
            console.print(f"{line}  {time.monotonic() - begun:.0f} s", style="dim", highlight=False)
        mine = [score(suite, table, unit, lines) for unit in table.units]
        scores += [each for each in mine if each is not None]
        console.print(result(suite, table, lines, scores))
        _write(suite, lines, scores, folder / FILE)
    plotted = draw(suite, lines, folder / PLOT)
    files = f"{FILE}, {PLOT}" if plotted else FILE
    console.print(f"the same in {folder}: {files}", highlight=False, soft_wrap=True)
    if not plotted:
        console.print(NO_PLOT)
    return tuple(lines)


def _foreseen(
    table: PublishedTable, row: PublishedRow, config_dir: str | None
) -> Iterator[ScoredFigure]:
    """A line for each published figure of the row."""
    try:
        recipe = load(list(row.overrides), config_dir)
        rehearsal = plan_row(recipe).rehearsal
    except (FlowrunError, MemoryError, RuntimeError) as error:
        if not isinstance(error, FlowrunError) and not _lacks_memory(error):
            raise
        for unit, published in row.figures:
            yield ScoredFigure(
                table=table.name,
                row=row.name,
                unit=unit,
                published=published,
                problem=" ".join(str(error).split()),
            )
        return
    for unit, published in row.figures:
        yield ScoredFigure(
            table=table.name,
            row=row.name,
            unit=unit,
            published=published,
            foreseen=UNITS[unit][1](recipe, rehearsal),
        )


def _lacks_memory(error: Exception) -> bool:
    """True if this machine cannot even name as many bytes as the row's tensors have."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _write(suite: Foreseen, lines: list[ScoredFigure], scores: list[Score], file: Path) -> None:
    text = {
        "suite": asdict(suite),
        "lines": [{**asdict(line), "error": line.error} for line in lines],
        "scores": [asdict(each) for each in scores],
    }
    file.write_text(json.dumps(strict(text), indent=1) + "\n")
