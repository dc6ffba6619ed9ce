"""frozen_steps: parameters that have no update in the first steps of a run, or were frozen in those
before it was resumed (part of the pass update_ops).

Until then their gradient counts as 0, in the norm too, and the update leaves weight and states as
they are.  Their own steps count from there, as those of a group that torch's optimizer is given
then (add_param_group).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalTensor, Ref, Variable
from flowrun.engine.passes.update.clip_ops import Gradients
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.strategy import Strategy


def freeze_first(
    builder: GraphBuilder, trained: Sequence[Variable], gradients: Gradients, strategy: Strategy
) -> Mapping[str, str]:
    """Return parameter -> whether this step is before its first, a scalar, and let its gradient be
    0 then, where a norm counts it.
    """
    frozen: dict[str, str] = {}
    for v in trained:
        if not (until := strategy.optimizer.frozen_until(v.name)):
            continue
        name, at = f"frozen<{until}@{v.stage}", OpPlace(v.stage)
        if name not in builder.tensors:
            read = Ref(builder.number("@step", v.stage)), until
            builder.one(name, "aten.le.Scalar", read, like=_flag(name), at=at)
        frozen[v.name] = name
        if strategy.optimizer.clip_norm or strategy.skips_nonfinite:
            gradient, like = gradients[v.name], builder.tensors[gradients[v.name]]
            args = (Ref(gradient), Ref(name), 0.0)
            gradients[v.name] = builder.one(
                f"if_trained/{v.tensor}",
                "aten.masked_fill.Scalar",
                args,
                like=like,
                at=OpPlace.of(v),
            )
    return frozen


def either(builder: GraphBuilder, v: Variable, one: str | None, other: str | None) -> str | None:
    """Return whether one of two scalars is true; None: neither is there."""
    if one is None or other is None:
        return one or other
    name = f"{one}|{other}"
    if name not in builder.tensors:
        args = (Ref(one), Ref(other))
        at = OpPlace(v.stage)
        builder.one(name, "aten.logical_or.default", args, like=_flag(name), at=at)
    return name


def count_own_steps(
    builder: GraphBuilder, v: Variable, strategy: Strategy, step: str | None
) -> str | None:
    """Return the number of a parameter's update, from 1; None: it is the step's.  step: of others.

    Raises RecipeError where loss scaling leaves out steps.
    """
    begun = dict(strategy.optimizer.begun)
    before = begun.get(v.name, strategy.optimizer.frozen_until(v.name))
    if not before:
        return step
    if strategy.loss_scale is not None:
        problem = f"{v.name} trains from step {before} on, and loss scaling leaves out steps."
        raise RecipeError("optim.groups", problem, "Write precision.dtype=bf16.")
    name = f"step-{before}@{v.stage}"
    if name not in builder.tensors:
        args = (Ref(builder.number("@step", v.stage)), float(before))
        builder.one(name, "aten.sub.Scalar", args, at=OpPlace(v.stage))
    return name


def _flag(name: str) -> LogicalTensor:
    return LogicalTensor(name, (), torch.bool)
