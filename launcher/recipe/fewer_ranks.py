"""Layouts of a recipe on fewer ranks: what is tried when ranks are lost for good."""

from __future__ import annotations

import math
from collections.abc import Iterator

import yaml  # type: ignore[import-untyped]

from flowrun.engine.ir.placement import BATCH_AXES
from flowrun.launcher.recipe.schema import Recipe


def layouts_on_fewer(recipe: Recipe, least: int) -> Iterator[tuple[str, ...]]:
    """Yield overrides of the recipe that leave it `least` ranks or more, in the order to try them.

    The axis that divides the batch shrinks first, so that every rank keeps its part of the model;
    where that is not possible, auto.placement chooses.  The batch, the learning rate and the
    samples of a step stay.
    """
    keys = yaml.safe_load(recipe.to_yaml())["placement"]
    axes, stages = keys["axes"], keys["stages"]
    batch_axis = next((axis for axis in axes if axis in BATCH_AXES), None)
    if batch_axis and isinstance(stages, int):
        others = stages * math.prod(size for axis, size in axes.items() if axis != batch_axis)
        for size in range(axes[batch_axis] - 1, 0, -1):
            if size * others >= least:
                yield (f"placement.axes.{batch_axis}={size}",)
    for ranks in range(recipe.num_ranks - 1, least - 1, -1):
        yield ("auto.placement=true", f"auto.ranks={ranks}")
