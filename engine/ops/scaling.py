"""Loss scaling, `flow.*` ops of the update: is every gradient finite, and what is the next scale?

The arithmetic is torch.amp.GradScaler's, on fp32 scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowrun.engine.ops.signature import Call, Local, LocalView, OpView, Rule, Signature
from flowrun.engine.sbp import P, S

Tensor = torch.Tensor


def count_nonfinite(x: Tensor) -> Tensor:
    """How many elements are infinite or no number, fp32 scalar."""
    return (~torch.isfinite(x)).sum().float()


def next_scale(
    scale: Tensor,
    good_steps: Tensor,
    skipped: Tensor,
    nonfinite: Tensor,
    *,
    growth: float,
    backoff: float,
    interval: int,
) -> tuple[Tensor, ...]:
    """(scale, good steps since it changed, updates skipped so far) after a step; then scale and
    skipped again, to report.

    nonfinite: elements of all gradients that are not finite; any: the update is skipped.
    """
    bad = nonfinite > 0
    good = good_steps + 1
    grows = good >= interval
    zero = torch.zeros_like(good)
    new_scale = torch.where(bad, scale * backoff, torch.where(grows, scale * growth, scale))
    new_scale = torch.where(torch.isfinite(new_scale), new_scale, scale)
    new_good = torch.where(bad | grows, zero, good)
    new_skipped = skipped + bad.float()
    return new_scale, new_good, new_skipped, new_scale.clone(), new_skipped.clone()


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "flow.count_nonfinite": count_nonfinite,
    "flow.next_scale": next_scale,
}


def counts(view: OpView) -> tuple[Signature, ...]:
    """A split gives P.  Not "P -> P": infinite parts can have a sum that is no number, and finite
    ones an infinite sum.
    """
    return tuple(Signature((S(d),), (P,)) for d in range(len(view.in_shapes[0])))


def scalars(view: OpView) -> tuple[Signature, ...]:
    """All-B only."""
    return ()


def local_function(view: LocalView) -> Call:
    """The function of the op, with its arguments as they are."""
    return Call(FUNCTIONS[view.op.target], view.op.args, view.op.kwargs)


RULES: Mapping[str, Rule] = {"flow.count_nonfinite": counts, "flow.next_scale": scalars}

LOCALS: Mapping[str, Local] = dict.fromkeys(FUNCTIONS, local_function)
