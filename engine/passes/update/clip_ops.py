"""clip_ops: gradients are clipped, and checked to be finite (part of the pass update_ops)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flowrun.engine.ir.graph import LogicalTensor, Ref, Variable
from flowrun.engine.ops.flow.scaling import NOT_FINITE
from flowrun.engine.ops.flow.update import ADD_N, CLIP_SCALE, SUMSQ
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.strategy import Strategy

Gradients = dict[str, str]  # parameter -> its summed gradient; passes replace tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """Scalars of a step that its updates read.

    squares: sum of the squares of all gradients; None: nothing asks for it.  coefficients: stage ->
    what multiplies gradients first.  skips: stage -> whether its updates are left out.  step:
    number of the update; None: of the step.  results: numbers that the step reports, name ->
    tensor.
    """

    squares: str | None = None
    coefficients: Mapping[int, str] = field(default_factory=dict)
    skips: Mapping[int, str] = field(default_factory=dict)
    step: str | None = None
    results: tuple[tuple[str, str], ...] = ()


def check_gradients(
    builder: GraphBuilder, trained: list[Variable], gradients: Gradients, strategy: Strategy
) -> Scalars:
    """Clip gradients, and see whether all are finite.

    One sum serves both.  It goes to every stage, which makes its own scalars of it: no stage waits
    for a second message.  Where the run ends at a step that is not finite, and nothing is clipped
    by the sum, a stage has the sum over itself and earlier stages, and does not wait for later
    ones: the first begins the next step while the last still makes gradients.
    """
    optimizer = strategy.optimizer
    if optimizer.clip_value:
        clip_by_value(builder, trained, gradients, optimizer.clip_value)
    if not trained or not (optimizer.clip_norm or strategy.skips_nonfinite):
        return Scalars()
    stages = sorted({v.stage for v in trained})
    if optimizer.clip_norm or strategy.skips_alike:
        squares = sum_squares(builder, "sumsq", trained, gradients)
        seen = dict.fromkeys(stages, squares)
    else:
        totals = _sum_over_stages(builder, "sumsq", trained, gradients)
        seen = _add_up_stages(builder, "sumsq", totals)
        squares = seen[stages[-1]]
    coefficients, skips = {}, {}
    for stage in stages:
        if optimizer.clip_norm:
            coefficients[stage] = clip_scale(builder, squares, optimizer.clip_norm, stage)
        if strategy.skips_nonfinite:
            name = f"skip@{stage}"
            skips[stage] = builder.tensor(name, LogicalTensor(name, (), torch.bool))
            read = (Ref(seen[stage]),)
            builder.op(name, NOT_FINITE, read, outputs=(name,), at=OpPlace(stage))
    return Scalars(squares=squares, coefficients=coefficients, skips=skips)


def clip_by_value(
    builder: GraphBuilder, variables: Sequence[Variable], gradients: Gradients, limit: float
) -> None:
    """Clamp every element of the gradients to [-limit, limit] (torch.nn.utils.clip_grad_value_)."""
    change_each(builder, "clipped", "aten.clamp.default", variables, gradients, -limit, limit)


def change_each(
    builder: GraphBuilder,
    prefix: str,
    target: str,
    variables: Sequence[Variable],
    gradients: Gradients,
    *others: Ref | float,
) -> None:
    """Replace every gradient by an op of it and of other arguments."""
    for v in variables:
        before = gradients[v.name]
        like, at = builder.tensors[before], OpPlace.of(v)
        args = (Ref(before), *others)
        gradients[v.name] = builder.one(f"{prefix}/{v.tensor}", target, args, like=like, at=at)


def clip_scale(builder: GraphBuilder, squares: str, max_norm: float, stage: int = 0) -> str:
    """Return the coefficient min(1, max_norm / norm) of the global norm of the gradients."""
    name = f"clip_scale@{stage}" if stage else "clip_scale"
    return builder.one(name, CLIP_SCALE, (Ref(squares), max_norm), at=OpPlace(stage))


def sum_squares(
    builder: GraphBuilder,
    name: str,
    variables: list[Variable],
    gradients: Gradients,
    stage: int = 0,
) -> str:
    """Return the sum of the squares of all gradients, on a stage.

    Each stage adds its own to the sum of those beyond it: messages go from neighbour to neighbour.
    """
    totals = _sum_over_stages(builder, name, variables, gradients)
    if len(totals) == 1:
        return next(iter(totals.values()))
    below, above = [k for k in totals if k < stage], [k for k in reversed(totals) if k > stage]
    ends = [totals[stage]] if stage in totals else []
    for side in filter(None, (below, above)):
        ends.append(_add_up_stages(builder, name, {k: totals[k] for k in side})[side[-1]])
    return builder.one(name, ADD_N, tuple(map(Ref, ends)), at=OpPlace(stage))


def _sum_over_stages(
    builder: GraphBuilder, name: str, variables: list[Variable], gradients: Gradients
) -> dict[int, str]:
    """Return stage -> the sum of the squares of its gradients, in the order of stages."""
    totals: dict[int, str] = {}
    for at in sorted({v.stage for v in variables}):
        parts = [
            builder.one(f"{name}/{v.tensor}", SUMSQ, (Ref(gradients[v.name]),), at=OpPlace.of(v))
            for v in variables
            if v.stage == at
        ]
        totals[at] = builder.one(f"{name}@{at}", ADD_N, tuple(map(Ref, parts)), at=OpPlace(at))
    return totals


def _add_up_stages(builder: GraphBuilder, name: str, totals: Mapping[int, str]) -> dict[int, str]:
    """Return stage -> the sum over it and all before it in `totals`; none waits for a later one."""
    sums: dict[int, str] = {}
    before: tuple[Ref, ...] = ()
    for at, own in totals.items():
        read = (*before, Ref(own))
        sums[at] = builder.one(f"{name}<{at}", ADD_N, read, at=OpPlace(at)) if before else own
        before = (Ref(sums[at]),)
    return sums
