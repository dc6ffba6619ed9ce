"""scale_loss: fp16's gradients kept in range, as ops (part of the pass update_ops).

The tangent of the loss is scale / micro_batches, so that small gradients do not vanish in fp16; the
update divides by the scale.  If an element of any gradient, on any rank of any stage, is not
finite, the whole update is skipped everywhere and a dynamic scale is halved; it doubles after 2000
updates (torch.amp.GradScaler).  All of it is state of the step: scale, updates since it changed,
updates skipped.  An optimizer's own count of steps leaves out the skipped ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flowrun.engine.ir.graph import BACKWARD, Feed, LogicalTensor, Ref, Variable
from flowrun.engine.ops.flow.scaling import NEXT_SCALE
from flowrun.engine.ops.flow.update import SUMSQ
from flowrun.engine.passes.update.clip_ops import total
from flowrun.engine.passes.update.graph_builder import GraphBuilder
from flowrun.engine.strategy import LossScale

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


@dataclass(frozen=True, slots=True)
class Scaled:
    """Scalars of the step; all on the stage of the loss.

    squares: sum of the squares of all scaled gradients; it is finite if they are, short of 1e19.
    inverse: 1 / scale.  skip: true if the update is skipped.  step: number of this update, from 1.
    results: what the step reports, name -> tensor.
    """

    squares: str
    inverse: str
    skip: str
    step: str
    results: tuple[tuple[str, str], ...]


def scaled_tangent(builder: GraphBuilder, feeds: list[Feed], start: float, share: float) -> bool:
    """Tangents are the state "loss_scale" times a micro-batch's share in the loss; False: there are
    none, as in evaluation.
    """
    if not feeds:
        return False
    scale = _state(builder, "loss_scale", feeds[0].stage, start)
    for feed in feeds:
        builder.op(
            feed.tensor,
            "aten.mul.Tensor",
            (Ref(scale), share),
            outputs=(feed.tensor,),
            module="loss",
            phase=BACKWARD,
            stage=feed.stage,
        )
    return True


def check_gradients(
    builder: GraphBuilder,
    variables: list[Variable],
    gradients: Mapping[str, str],
    loss_scale: LossScale,
) -> Scaled:
    """Whether all scaled gradients are finite, and what follows from it."""
    scale = builder.variables[builder.free_name("loss_scale")]
    stage = scale.stage
    good = _state(builder, "good_steps", stage, 0.0)
    skipped = _state(builder, "skipped_updates", stage, 0.0)
    squares = total(builder, SUMSQ, "scaled_sumsq", variables, gradients, stage)
    dynamic = loss_scale.dynamic
    new = tuple(f"{tensor}'" for tensor in (scale.tensor, good, skipped))
    told = tuple(builder.tensor(f"{tensor}/told") for tensor in (scale.tensor, skipped))
    skip = builder.tensor("skip", LogicalTensor("skip", (), torch.bool))
    builder.op(
        "next_scale",
        NEXT_SCALE,
        (Ref(scale.tensor), Ref(good), Ref(skipped), Ref(squares)),
        (
            ("growth", GROWTH if dynamic else 1.0),
            ("backoff", BACKOFF if dynamic else 1.0),
            ("interval", INTERVAL),
        ),
        (*new, *told, skip),
        stage=stage,
    )
    step = builder.one(
        "update_number",
        "aten.sub.Tensor",
        (Ref(builder.number("@step", stage)), Ref(skipped)),
        stage=stage,
    )
    inverse = builder.one("unscale", "aten.reciprocal.default", (Ref(scale.tensor),), stage=stage)
    results = (("loss_scale", told[0]), ("skipped_updates", told[1]))
    return Scaled(squares, inverse, skip, step, results)


def unscale(
    builder: GraphBuilder, variables: list[Variable], gradients: dict[str, str], inverse: str
) -> None:
    """Every gradient divided by the scale."""
    for v in variables:
        gradients[v.name] = builder.one(
            f"unscaled/{v.tensor}",
            "aten.mul.Tensor",
            (Ref(gradients[v.name]), Ref(inverse)),
            like=builder.tensors[gradients[v.name]],
            module=v.name.rpartition(".")[0],
            stage=v.stage,
        )


def _state(builder: GraphBuilder, name: str, stage: int, start: float) -> str:
    """A scalar of the step itself that lives from step to step; its tensor."""
    made = builder.tensor(name)
    new = builder.tensor(f"{name}'")
    name = builder.free_name(name)
    builder.variables[name] = Variable(name, made, "state", new, "", stage, start=start)
    return made
