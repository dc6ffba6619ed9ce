"""clip_ops: gradients made smaller before the update, as ops (part of the pass update_ops)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrun.engine.ir.graph import Ref, Variable
from flowrun.engine.ops.flow.update import ADD_N, CLIP_SCALE, SUMSQ
from flowrun.engine.passes.update.graph_builder import GraphBuilder


def clip_by_value(
    builder: GraphBuilder, variables: list[Variable], gradients: dict[str, str], limit: float
) -> None:
    """Every element within [-limit, limit] (torch.nn.utils.clip_grad_value_)."""
    for v in variables:
        gradients[v.name] = builder.one(
            f"clipped/{v.tensor}",
            "aten.clamp.default",
            (Ref(gradients[v.name]), -limit, limit),
            like=builder.tensors[gradients[v.name]],
            module=v.name.rpartition(".")[0],
            stage=v.stage,
        )


def clip_by_norm(
    builder: GraphBuilder,
    variables: list[Variable],
    gradients: dict[str, str],
    max_norm: float,
    inverse: str | None = None,
    squares: str | None = None,
) -> str:
    """Coefficient min(1, max_norm / norm) of the global norm.

    inverse: scalar that the gradients are to be multiplied by first: it is part of the coefficient.
    squares: the sum of their squares as they are, if there is one.
    """
    squares = squares or total(builder, SUMSQ, "sumsq", variables, gradients)
    if inverse is None:
        return builder.one("clip_scale", CLIP_SCALE, (Ref(squares), max_norm))
    factor = builder.one("unscale_squared", "aten.mul.Tensor", (Ref(inverse), Ref(inverse)))
    squares = builder.one("sumsq/unscaled", "aten.mul.Tensor", (Ref(squares), Ref(factor)))
    clip = builder.one("clip_scale", CLIP_SCALE, (Ref(squares), max_norm))
    return builder.one("coefficient", "aten.mul.Tensor", (Ref(clip), Ref(inverse)))


def total(
    builder: GraphBuilder,
    target: str,
    name: str,
    variables: list[Variable],
    gradients: Mapping[str, str],
    stage: int = 0,
) -> str:
    """Sum over all gradients of a scalar of each: of a stage's first, then over the stages.

    stage: where the sum is made.
    """
    totals: list[Any] = []
    for at in sorted({v.stage for v in variables}):
        parts = [
            builder.one(
                f"{name}/{v.tensor}",
                target,
                (Ref(gradients[v.name]),),
                module=v.name.rpartition(".")[0],
                stage=at,
            )
            for v in variables
            if v.stage == at
        ]
        made = builder.one(f"{name}@{at}", ADD_N, tuple(map(Ref, parts)), stage=at)
        totals.append(Ref(made))
    if len(totals) == 1:
        return str(totals[0].name)
    return builder.one(name, ADD_N, tuple(totals), stage=stage)
