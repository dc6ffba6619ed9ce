"""Layouts of a recipe on fewer ranks: what is tried when ranks or hosts are lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import yaml  # type: ignore[import-untyped]

from flowrun.engine.ir.placement import BATCH_AXES
from flowrun.launcher.recipe.recipe import Recipe


def layouts_on(recipe: Recipe, ranks: int) -> Iterator[tuple[str, ...]]:
    """Yield overrides of the recipe that leave it `ranks` ranks, in the order to try them.

    The axis that divides the batch shrinks, so that every rank keeps its part of the model; where
    that is not possible, auto.placement chooses.  The batch, the learning rate and the samples of a
    step stay.
    """
    yield from _shrunk(recipe, ranks)
    yield _search(ranks)


def layouts_on_fewer(recipe: Recipe, least: int) -> Iterator[tuple[str, ...]]:
    """Yield overrides of the recipe that leave it `least` ranks or more: those of layouts_on, first
    all in which every rank keeps its part of the model.
    """
    fewer = range(recipe.num_ranks - 1, least - 1, -1)
    for ranks in fewer:
        yield from _shrunk(recipe, ranks)
    for ranks in fewer:
        yield _search(ranks)


def _shrunk(recipe: Recipe, ranks: int) -> Iterator[tuple[str, ...]]:
    keys = yaml.safe_load(recipe.to_yaml())["placement"]
    axes, stages = keys["axes"], keys["stages"]
    batch_axis = next((axis for axis in axes if axis in BATCH_AXES), None)
    if batch_axis and isinstance(stages, int):
        others = stages * math.prod(size for axis, size in axes.items() if axis != batch_axis)
        size, left = divmod(ranks, others)
        if size and not left:
            yield (f"placement.axes.{batch_axis}={size}",)


def _search(ranks: int) -> tuple[str, ...]:
    return "auto.placement=true", f"auto.ranks={ranks}"
