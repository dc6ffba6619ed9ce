"""Loss scaling, a `flow.*` op of the update: is every gradient finite, and what is the next scale?

The arithmetic is torch.amp.GradScaler's, on fp32 scalars.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ops.op_info import OpInfo
from flowrun.engine.ops.signature import whole

Tensor = torch.Tensor


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


NEXT_SCALE = "flow.next_scale"
OPS: Mapping[str, OpInfo] = {NEXT_SCALE: OpInfo(whole, function=next_scale)}
