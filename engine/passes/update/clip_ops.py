"""clip_ops: ops that clip gradients before the update (part of the pass update_ops)."""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ir.graph import Ref, Variable
from flowrun.engine.ops.flow.update import ADD_N, CLIP_SCALE
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace


def clip_by_value(
    builder: GraphBuilder, variables: list[Variable], gradients: dict[str, str], limit: float
) -> None:
    """Clamp every element of the gradients to [-limit, limit] (torch.nn.utils.clip_grad_value_).

    gradients: parameter -> tensor; replaced.
    """
    for v in variables:
        gradients[v.name] = builder.one(
            f"clipped/{v.tensor}",
            "aten.clamp.default",
            (Ref(gradients[v.name]), -limit, limit),
            like=builder.tensors[gradients[v.name]],
            at=OpPlace.of(v),
        )


def clip_scale(builder: GraphBuilder, squares: str, max_norm: float, stage: int = 0) -> str:
    """Return the coefficient min(1, max_norm / norm) of the global norm of the gradients."""
    name = f"clip_scale@{stage}" if stage else "clip_scale"
    return builder.one(name, CLIP_SCALE, (Ref(squares), max_norm), at=OpPlace(stage))


def sum_over_gradients(
    builder: GraphBuilder,
    target: str,
    name: str,
    variables: list[Variable],
    gradients: Mapping[str, str],
    stage: int = 0,
) -> str:
    """Return the sum over all gradients of a scalar of each: first over a stage, then over the
    stages.

    target: the op that makes the scalar.
    """
    totals = sum_over_stages(builder, target, name, variables, gradients)
    if len(totals) == 1:
        return next(iter(totals.values()))
    return builder.one(name, ADD_N, tuple(map(Ref, totals.values())), at=OpPlace(stage))


def sum_over_stages(
    builder: GraphBuilder,
    target: str,
    name: str,
    variables: list[Variable],
    gradients: Mapping[str, str],
) -> dict[int, str]:
    """Return stage -> the sum over its gradients of a scalar of each, in the order of stages."""
    totals: dict[int, str] = {}
    for at in sorted({v.stage for v in variables}):
        parts = [
            builder.one(f"{name}/{v.tensor}", target, (Ref(gradients[v.name]),), at=OpPlace.of(v))
            for v in variables
            if v.stage == at
        ]
        totals[at] = builder.one(f"{name}@{at}", ADD_N, tuple(map(Ref, parts)), at=OpPlace(at))
    return totals


def add_up_stages(builder: GraphBuilder, name: str, totals: Mapping[int, str]) -> dict[int, str]:
    """Return stage -> the sum over it and all stages before it.

    totals: stage -> its own, in the order of stages.  No stage waits for a later one.
    """
    sums: dict[int, str] = {}
    before: str | None = None
    for at, own in totals.items():
        if before is None:
            before = own
        else:
            before = builder.one(f"{name}<{at}", ADD_N, (Ref(before), Ref(own)), at=OpPlace(at))
        sums[at] = before
    return sums
