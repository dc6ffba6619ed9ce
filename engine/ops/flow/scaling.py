"""Ops of the update that ask whether every gradient is finite: `flow.not_finite`, and
`flow.next_scale` of loss scaling, which also says what the next scale is.

The arithmetic of the scale is torch.amp.GradScaler's, on fp32 scalars.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.op_info import OpInfo
from flowrun.engine.ir.signature import whole

Tensor = torch.Tensor


def not_finite(squares: Tensor) -> Tensor:
    """Return whether an update is skipped: its gradients are not all finite.

    squares: sum of their squares, an fp32 scalar; it is finite if all are, up to 1e19.
    """
    return ~torch.isfinite(squares)


def next_scale(
    scale: Tensor,
    good_steps: Tensor,
    skipped: Tensor,
    squares: Tensor,
    *,
    growth: float,
    backoff: float,
    interval: int,
) -> tuple[Tensor, ...]:
    """Return (scale, good steps since it changed, updates skipped so far) after a step; scale and
    skipped again, to report; whether this update is skipped.

    scale, good_steps, skipped: before the step.
    squares: sum of the squares of all scaled gradients; not finite: the update is skipped.
    growth, backoff: factors of the scale after `interval` good steps, and after a skipped one.
    """
    bad = ~torch.isfinite(squares)
    good = good_steps + 1
    grows = good >= interval
    zero = torch.zeros_like(good)
    new_scale = torch.where(bad, scale * backoff, torch.where(grows, scale * growth, scale))
    new_scale = torch.where(torch.isfinite(new_scale), new_scale, scale)
    new_good = torch.where(bad | grows, zero, good)
    new_skipped = skipped + bad.float()
    return new_scale, new_good, new_skipped, new_scale.clone(), new_skipped.clone(), bad


NEXT_SCALE, NOT_FINITE = "flow.next_scale", "flow.not_finite"
OPS: Mapping[str, OpInfo] = {  # of the whole sum: parts of it may be finite where it is not
    NEXT_SCALE: OpInfo(whole, function=next_scale),
    NOT_FINITE: OpInfo(whole, function=not_finite),
}
