"""scale_loss: loss scaling for fp16 gradients, as ops (part of the pass update_ops).

The tangent of the loss is scale / micro_batches, so that small gradients do not vanish in fp16; the
update divides by the scale.  If an element of any gradient, on any rank of any stage, is not
finite, the whole update is skipped everywhere and a dynamic scale is halved; it doubles after 2000
updates (torch.amp.GradScaler).  The scale, the number of updates since it changed and the number of
skipped updates are states of the step.  An optimizer's own count of steps leaves out skipped ones.
"""

from __future__ import annotations

import torch

from flowrun.engine.ir.graph import BACKWARD, Feed, LogicalTensor, Ref, Variable
from flowrun.engine.ops.flow.scaling import NEXT_SCALE
from flowrun.engine.passes.update.clip_ops import (
    Gradients,
    Scalars,
    change_each,
    clip_by_value,
    clip_scale,
    sum_squares,
)
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.strategy import Strategy

GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL_STEPS = 2.0, 0.5, 2000


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


def check_scaled_gradients(
    builder: GraphBuilder, trained: list[Variable], gradients: Gradients, strategy: Strategy
) -> Scalars:
    """Clip gradients that are multiples of the loss scale, and see whether all are finite.

    All scalars are on the stage of the loss.
    """
    optimizer, scale = strategy.optimizer, builder.variables[builder.free_name("loss_scale")]
    stage, at = scale.stage, OpPlace(scale.stage)
    good = _state(builder, "good_steps", stage, 0.0)
    skipped = _state(builder, "skipped_updates", stage, 0.0)
    squares = sum_squares(builder, "scaled_sumsq", trained, gradients, stage)
    dynamic = strategy.loss_scale is not None and strategy.loss_scale.dynamic
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
        at=at,
    )
    counted = (Ref(builder.number("@step", stage)), Ref(skipped))
    step = builder.one("update_number", "aten.sub.Tensor", counted, at=at)
    inverse = builder.one("unscale", "aten.reciprocal.default", (Ref(scale.tensor),), at=at)

    def multiply(name: str, *factors: str) -> str:
        return builder.one(name, "aten.mul.Tensor", tuple(map(Ref, factors)), at=at)

    squares = multiply("sumsq/unscaled", squares, multiply("unscale_squared", inverse, inverse))
    coefficient: str | None = inverse
    if optimizer.clip_value:
        change_each(builder, "unscaled", "aten.mul.Tensor", trained, gradients, Ref(inverse))
        clip_by_value(builder, trained, gradients, optimizer.clip_value)
        coefficient = None
        if optimizer.clip_norm:
            squares = sum_squares(builder, "sumsq", trained, gradients, stage)
    if optimizer.clip_norm:
        clip = clip_scale(builder, squares, optimizer.clip_norm, stage)
        coefficient = multiply("coefficient", clip, coefficient) if coefficient else clip
    stages = {v.stage for v in trained}
    return Scalars(
        squares=squares,
        coefficients=dict.fromkeys(stages, coefficient) if coefficient else {},
        skips=dict.fromkeys(stages, skip),
        step=step,
        results=(("loss_scale", reported[0]), ("skipped_updates", reported[1])),
    )


def _state(builder: GraphBuilder, name: str, stage: int, start: float) -> str:
    """Add a scalar that the step keeps from step to step; return its tensor."""
    tensor = builder.tensor(name)
    new = builder.tensor(f"{name}'")
    name = builder.free_name(name)
    builder.variables[name] = Variable(name, tensor, "state", new, of="", stage=stage, start=start)
    return tensor
