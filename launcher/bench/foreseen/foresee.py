"""The story of published tables: each row planned and rehearsed, none of it run; then a table a
table, files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from flowrun.engine.capture.capture import Task
from flowrun.engine.compile import Compilation, Rehearsed
from flowrun.engine.errors import FlowrunError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.launcher.bench.bench import PLOT, show_files, write_results
from flowrun.launcher.bench.foreseen.published import UNITS, Foreseen, PublishedTable
from flowrun.launcher.bench.foreseen.score import Score, ScoredFigure, score
from flowrun.launcher.bench.foreseen.show_tables import draw, result
from flowrun.launcher.job.plan_cache import PlanCache, inputs
from flowrun.launcher.job.recipe_strategy import AUTOCAST, strategy_of
from flowrun.launcher.model import build
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe


def foresee(
    suite: Foreseen, folder: Path, console: Console, config_dir: str | None = None
) -> tuple[ScoredFigure, ...]:
    """Plan every row of the suite, print each table to `console` as it is done, and fill `folder`.

    config_dir: the user's own groups.
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
        found = plan_row(recipe).rehearsal
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


def plan_row(recipe: Recipe) -> Rehearsed:
    """Plan the training of a recipe of any size, or read the plan that is on disk: weights and
    samples have shapes and no bytes.  Raises FlowrunError.

    Attention is written as products and a softmax: published figures are of software without a
    fused kernel.
    """
    model = build.describe_model(recipe, draws=False).model
    item = build.instantiate_data(recipe)[0]
    task = Task(
        model,
        build.task_inputs(recipe, model, item),
        build.instantiate_loss(recipe),
        autocast=AUTOCAST[recipe.precision.dtype],
        decomposed_attention=True,
        low_precision_attention=True,
        seed=recipe.train.seed,
        keep_logits=recipe.engine.keeps_logits,
    )
    strategy = strategy_of(recipe)
    cache = PlanCache(recipe.engine.cache)

    def keep(_: str, graphs: tuple[LogicalGraph, ...], make: Callable[[], Rehearsed]) -> Rehearsed:
        return cache.get("foreseen", inputs(strategy, *graphs), make)

    batch = {name: _samples(value, recipe.micro_batch_size) for name, value in item.items()}
    return Compilation(task, batch, strategy, keep).training


def _samples(value: Tensor, count: int) -> Tensor:
    """Make many samples of one; nothing is written, so that they take no page of memory."""
    return torch.empty((count, *value.shape), dtype=value.dtype)
