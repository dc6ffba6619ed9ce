"""A recipe -> its plan and rehearsal, of any size: weights and samples have shapes and no bytes.

Attention is written as products and a softmax: published figures are of software without a fused
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flowrun.engine.capture.capture import Task
from flowrun.engine.compile import Compilation, Rehearsed
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.launcher.job.plan_cache import PlanCache, inputs
from flowrun.launcher.job.recipe_strategy import AUTOCAST, strategy_of
from flowrun.launcher.model import build
from flowrun.launcher.recipe.recipe import Recipe


def plan_row(recipe: Recipe) -> Rehearsed:
    """Plan the training of a recipe, or read the plan that is on disk.  Raises FlowrunError."""
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
    example = batch_like(item, recipe.micro_batch_size)
    cache = PlanCache(recipe.engine.cache)

    def keep(_: str, graphs: tuple[LogicalGraph, ...], make: Callable[[], Rehearsed]) -> Rehearsed:
        return cache.get("foreseen", inputs(strategy, *graphs), make)

    return Compilation(task, example, strategy, keep).training


def batch_like(item: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Make a batch of `samples` samples like `item`.  Nothing is written, so that it takes no page
    of memory: capture looks at shapes alone.
    """
    return {
        name: torch.empty((samples, *value.shape), dtype=value.dtype)
        for name, value in item.items()
    }
