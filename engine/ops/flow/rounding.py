"""Tensors that are kept in bf16 and updated in fp32: the new values are rounded at random.

A value between two neighbours of bf16 becomes the upper one with a probability that is its distance
from the lower, so that small updates are kept on average.  The invariant: what a value becomes is a
function of the value, the seed, the tensor's name, the number of the step and the element's place
in the logical tensor, and of nothing else.  So no layout changes it, a rank rounds what it holds,
and a value that bf16 has stays (decision 34).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flowrun.engine.ir.op_info import OpCost, OpInfo, Trait
from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.ir.signature import Function, Local, LocalCall
from flowrun.engine.ops.flow.random import words
from flowrun.engine.ops.flow.update import FUSED, Changed, one_or_all, update
from flowrun.engine.ops.math.pointwise import NONLINEAR

Tensor = torch.Tensor

NARROW = torch.bfloat16  # the upper half of an fp32 number
_LOWER_HALF = 0xFFFF
_PIECE = 1 << 18  # elements that are wide at once


# ---- functions -----------------------------------------------------------------------------------


def round_at_random(
    x: Tensor, draw: Tensor, seed: int, stream: str, shape: Shape, *, slices: Slices | None = None
) -> Tensor:
    """Round fp32 to bf16, up or down at random.

    draw: scalar, the number of the step.  seed, stream, shape, slices: see words.
    """
    low = words(draw, seed, stream, shape, slices).bitwise_and_(_LOWER_HALF)
    bits = low.add_(x.contiguous().view(torch.int32)).bitwise_and_(~_LOWER_HALF)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(NARROW)


def update_narrow(
    param: Tensor,
    grad: Tensor,
    *states: Tensor,
    optimizer: str,
    draw: Tensor,
    seed: int,
    stream: str,
    shape: Shape,
    slices: Slices | None = None,
    **numbers: Any,
) -> Changed:
    """Update a weight and its states in place, in fp32; what is bf16 is rounded at random.

    param, grad, states: of one shape.  optimizer: adamw or sgd.  draw: scalar, the number of the
    step.  seed, shape, slices: see words.  stream: of the weight; the k-th state has one of its
    own.  numbers: of the optimizer.  Some rows are wide at a time.
    """
    changed = (param, *states)
    if param.dim() == 0:
        param, grad, *rest = (x.view(1) for x in (param, grad, *states))
        states, shape, slices = tuple(rest), (1,), None
    (first, _), *inside = slices or tuple((0, size) for size in shape)
    for start, length in _pieces(param):
        rows = [x.narrow(0, start, length) for x in (param, *states)]
        wide = [x.to(torch.float32, copy=True) for x in rows]
        FUSED[optimizer].one(wide[0], grad.narrow(0, start, length), *wide[1:], **numbers)
        places = ((first + start, length), *inside)
        for k, (row, new) in enumerate(zip(rows, wide, strict=True)):
            if row.dtype == NARROW:
                new = round_at_random(new, draw, seed, stream_of(stream, k), shape, slices=places)
            row.copy_(new)
    return one_or_all(changed)


def stream_of(name: str, k: int) -> str:
    """Return the stream of random numbers of a parameter (k = 0), or of its k-th state."""
    return f"round {name} {k}"


def _pieces(x: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first of some rows, and their number."""
    rows = len(x)
    count = max(1, _PIECE * rows // max(1, x.numel()))
    return ((start, min(count, rows - start)) for start in range(0, rows, count))


# ---- signatures: any dim may be split; not P: rounded parts do not add up to the rounded sum -----


def _here(program: Function) -> Local:
    """The slices that this rank holds."""
    return lambda view: LocalCall(
        program, view.op.args, (*view.op.kwargs, ("slices", view.in_slices[0]))
    )


ROUND, UPDATE_NARROW = "flow.round", "flow.update_narrow"
# Some 20 torch ops over words of 32 bits, for each tensor that is rounded.
_SCRATCH_BYTES = 150.0

OPS: Mapping[str, OpInfo] = {
    ROUND: OpInfo(
        NONLINEAR,
        local=_here(round_at_random),
        function=round_at_random,
        traits=(Trait.PLAIN,),
        cost=OpCost(scratch_bytes=_SCRATCH_BYTES),
    ),
    UPDATE_NARROW: OpInfo(
        update,
        local=_here(update_narrow),
        function=update_narrow,
        traits=(Trait.IN_PLACE, Trait.PLAIN),
        cost=OpCost(
            moved_bytes=lambda op, read, made: 2.0 * sum(read), scratch_bytes=2 * _SCRATCH_BYTES
        ),
    ),
}
