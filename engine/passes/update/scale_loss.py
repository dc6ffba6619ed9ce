"""scale_loss: loss scaling for fp16 gradients, as ops (part of the pass update_ops).

The tangent of the loss is scale / micro_batches, so that small gradients do not vanish in fp16; the
update divides by the scale.  If an element of any gradient, on any rank of any stage, is not
finite, the whole update is skipped everywhere and a dynamic scale is halved; it doubles after 2000
updates (torch.amp.GradScaler).  The scale, the number of updates since it changed and the number of
skipped updates are states of the step.  An optimizer's own count of steps leaves out skipped ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flowrun.engine.ir.graph import BACKWARD, Feed, LogicalTensor, Ref, Variable
from flowrun.engine.ops.flow.scaling import NEXT_SCALE
from flowrun.engine.ops.flow.update import SUMSQ
from flowrun.engine.passes.update.clip_ops import sum_over_gradients
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.strategy import LossScale

GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL_STEPS = 2.0, 0.5, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledGradients:
    """Scalars of the step; all on the stage of the loss, `stage`.

    squares: sum of the squares of all scaled gradients; finite if all are, up to 1e19.
    inverse: 1 / scale.  skip: true if the update is skipped.  step: number of this update, from 1.
    results: numbers that the step reports, name -> tensor.
    """

    stage: int
    squares: str
    inverse: str
    skip: str
    step: str
    results: tuple[tuple[str, str], ...]


def scale_tangent(builder: GraphBuilder, feeds: list[Feed], start: float, share: float) -> bool:
    """Set the tangents to the state "loss_scale" times a micro-batch's share in the loss.

    feeds: of the tangent, on each stage.  start: initial scale.  share: 1 / micro_batches.  Returns
    False if there are no tangents, as in evaluation.
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
            at=OpPlace(feed.stage, "loss", BACKWARD),
        )
    return True


def check_gradients(
    builder: GraphBuilder,
    variables: list[Variable],
    gradients: Mapping[str, str],
    loss_scale: LossScale,
) -> ScaledGradients:
    """Append the check that all scaled gradients are finite; return the scalars that follow from
    it.
    """
    scale = builder.variables[builder.free_name("loss_scale")]
    stage = scale.stage
    good = _state(builder, "good_steps", stage, 0.0)
    skipped = _state(builder, "skipped_updates", stage, 0.0)
    squares = sum_over_gradients(builder, SUMSQ, "scaled_sumsq", variables, gradients, stage)
    dynamic = loss_scale.dynamic
    new = tuple(f"{tensor}'" for tensor in (scale.tensor, good, skipped))
    reported = tuple(builder.tensor(f"{tensor}/reported") for tensor in (scale.tensor, skipped))
    skip = builder.tensor("skip", LogicalTensor("skip", (), torch.bool))
    builder.op(
        "next_scale",
        NEXT_SCALE,
        (Ref(scale.tensor), Ref(good), Ref(skipped), Ref(squares)),
        (
            ("growth", GROWTH_FACTOR if dynamic else 1.0),
            ("backoff", BACKOFF_FACTOR if dynamic else 1.0),
            ("interval", GROWTH_INTERVAL_STEPS),
        ),
        (*new, *reported, skip),
        at=OpPlace(stage),
    )
    counted = (Ref(builder.number("@step", stage)), Ref(skipped))
    step = builder.one("update_number", "aten.sub.Tensor", counted, at=OpPlace(stage))
    reciprocal = "aten.reciprocal.default"
    inverse = builder.one("unscale", reciprocal, (Ref(scale.tensor),), at=OpPlace(stage))
    results = (("loss_scale", reported[0]), ("skipped_updates", reported[1]))
    return ScaledGradients(
        stage=stage, squares=squares, inverse=inverse, skip=skip, step=step, results=results
    )


def unscale_squares(builder: GraphBuilder, scaled: ScaledGradients) -> str:
    """Append and return the sum of the squares of the gradients as they are without the scale."""
    inverse, stage = scaled.inverse, scaled.stage
    factor = multiply(builder, "unscale_squared", inverse, inverse, stage)
    return multiply(builder, "sumsq/unscaled", scaled.squares, factor, stage)


def multiply(builder: GraphBuilder, name: str, one: str, other: str, stage: int) -> str:
    """Append the product of two scalars, and return it."""
    return builder.one(name, "aten.mul.Tensor", (Ref(one), Ref(other)), at=OpPlace(stage))


def unscale(
    builder: GraphBuilder, variables: list[Variable], gradients: dict[str, str], inverse: str
) -> None:
    """Divide every gradient by the scale.

    gradients: parameter -> tensor; replaced.  inverse: 1 / scale.
    """
    for v in variables:
        gradients[v.name] = builder.one(
            f"unscaled/{v.tensor}",
            "aten.mul.Tensor",
            (Ref(gradients[v.name]), Ref(inverse)),
            like=builder.tensors[gradients[v.name]],
            at=OpPlace.of(v),
        )


def _state(builder: GraphBuilder, name: str, stage: int, start: float) -> str:
    """Add a scalar that the step keeps from step to step; return its tensor."""
    tensor = builder.tensor(name)
    new = builder.tensor(f"{name}'")
    name = builder.free_name(name)
    builder.variables[name] = Variable(name, tensor, "state", new, of="", stage=stage, start=start)
    return tensor
