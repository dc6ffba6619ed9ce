"""The recipe of a forward over a window of tokens, in the layout of a run.

The window is a batch of an evaluation without targets, whose metric is no number but the logits of
the next token.  Rows beyond the first fill the ranks that divide the batch, and are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrun.engine.capture.joint_graph import LOSS
from flowrun.engine.ir.placement import BATCH_AXES
from flowrun.engine.strategy import Recompute
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import Eval, Optim, Precision, TaskKeys

_ONE_STEP: Mapping[str, Any] = {
    "micro_batches": 1,
    "steps": 1,
    "epochs": 0.0,
    "save": False,
    "save_every": 0,
    "keep_best": "",
}
NEXT = "next"  # name of the result that holds the logits of the next token
_TOKENS, _LAST = "tokens", "last"  # fields of the batch


def recipe_of_window(recipe: Recipe, argument: str, length: int) -> Recipe:
    """Return a recipe whose evaluation reports the logits of the next token.

    recipe: of the run; its placement, pins and ZeRO stay, on one host.  argument: of the model,
    that takes tokens.  length: tokens of the window.  It computes in fp32, as one process does.
    """
    here = f"{__name__}."
    rows = count_rows(recipe)
    return replace(
        recipe,
        data={"_target_": f"{here}BlankWindows", "length": length, "count": 2 * rows},
        task=TaskKeys(
            inputs={argument: _TOKENS},
            loss={"_target_": f"{here}mean_logit"},
            metrics={NEXT: {"_target_": f"{here}next_logits"}},
        ),
        eval=Eval(fraction=0.5, batches=1, sample=False),
        optim=Optim(name="sgd"),
        in_flight="auto",
        pins=tuple(pin for pin in recipe.pins if not pin.pattern.startswith(LOSS)),
        view="consistent",
        recompute=Recompute(),
        auto=replace(recipe.auto, placement=False),
        precision=Precision(
            param_dtype=recipe.precision.param_dtype, keep_fp32=recipe.precision.keep_fp32
        ),
        train=replace(recipe.train, **_ONE_STEP, batch_size=rows),
        launch=replace(recipe.launch, name="local", nnodes=1, rdzv_endpoint=""),
        engine=replace(recipe.engine, check_capture=False, trace=False, verify_every=0),
        hardware=replace(recipe.hardware, memory_bytes=0),
    )


def count_rows(recipe: Recipe) -> int:
    """Return the rows of a batch of which each rank that divides it has one."""
    axes = {*BATCH_AXES, recipe.zero.axis}
    grids = [placement.axes for placement in recipe.placements]
    return math.lcm(*(math.prod(size for axis, size in grid if axis in axes) for grid in grids))


@dataclass(frozen=True)
class BlankWindows:
    """`count` windows of `length` tokens: {tokens (T,) int64, last (T,) bool}, all 0."""

    length: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            _TOKENS: torch.zeros(self.length, dtype=torch.int64),
            _LAST: torch.zeros(self.length, dtype=torch.bool),
        }


class WindowBatches:
    """The batch of the ranks: the first row is the text so far, with 0 after it.

    A causal model computes nothing of what comes after.  ids: of the text, as many as fit at most.
    """

    def __init__(self, rows: int, length: int) -> None:
        """rows, length: of the batch."""
        self._shape = rows, length
        self.ids: Sequence[int] = ()

    def __call__(self, step: int, micro_batch: int, rows: slice) -> Mapping[str, Tensor]:
        tokens = torch.zeros(self._shape, dtype=torch.int64)
        tokens[0, : len(self.ids)] = torch.tensor(self.ids)
        last = torch.zeros(self._shape, dtype=torch.bool)
        last[0, len(self.ids) - 1] = True
        return {_TOKENS: tokens[rows], _LAST: last[rows]}


def logits_of(output: Any) -> Tensor:
    """Return the logits (B, T, V) of what a model returns."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def mean_logit(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a scalar, for the plan alone: a training that never runs."""
    return logits_of(output).float().mean()


def next_logits(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits (V,) that follow the last token of the text."""
    return torch.where(batch[_LAST][..., None], logits_of(output).float(), 0.0).sum((0, 1))


next_logits.of_vector = True  # type: ignore[attr-defined]
