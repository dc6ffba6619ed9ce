"""clip_ops: gradients made smaller before the update, as ops (part of the pass update_ops)."""

from __future__ import annotations

from typing import Any

from flowrun.engine.graph import Ref, Variable
from flowrun.engine.passes.graph_builder import GraphBuilder


def clip_by_value(
    builder: GraphBuilder, variables: list[Variable], gradients: dict[str, str], limit: float
) -> None:
    """Every element within [-limit, limit] (torch.nn.utils.clip_grad_value_)."""
    for v in variables:
        gradients[v.name] = builder.one(
            f"clipped/{v.name}",
            "aten.clamp.default",
            (Ref(gradients[v.name]), -limit, limit),
            like=builder.tensors[gradients[v.name]],
            module=v.name.rpartition(".")[0],
            stage=v.stage,
        )


def clip_by_norm(
    builder: GraphBuilder, variables: list[Variable], gradients: dict[str, str], max_norm: float
) -> str:
    """Coefficient min(1, max_norm / norm) of the global norm; partial sums of a stage first, then
    over the stages.
    """
    totals: list[Any] = []
    for stage in sorted({v.stage for v in variables}):
        squares = [
            builder.one(
                f"sumsq/{v.name}",
                "flow.sumsq",
                (Ref(gradients[v.name]),),
                module=v.name.rpartition(".")[0],
                stage=stage,
            )
            for v in variables
            if v.stage == stage
        ]
        total = builder.one(f"sumsq@{stage}", "flow.add_n", tuple(map(Ref, squares)), stage=stage)
        totals.append(Ref(total))
    norm = totals[0].name
    if len(totals) > 1:
        norm = builder.one("sumsq", "flow.add_n", tuple(totals))
    return builder.one("clip_scale", "flow.clip_scale", (Ref(norm), max_norm))
