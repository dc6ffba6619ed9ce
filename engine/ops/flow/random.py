"""The engine's own random ops: numbers that depend on the seed, the op, the draw, and the place of
an element in the logical tensor, and on nothing else.

A draw is a micro-batch, counted over the whole run (feed "@draw").  Each element's number is a hash
of all that, so a rank makes the elements that it holds and no others, every layout and every device
gives the same numbers, and an op that is run again (activation checkpointing) draws them again.
The hash is xor-shifts and multiplications of 32-bit words, constants from a search for the least
bias (github.com/skeeto/hash-prospector).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from flowrun.engine.ir.op_info import OpCost, OpInfo, Trait
from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.ir.signature import LocalCall, LocalView
from flowrun.engine.ops.math.pointwise import LINEAR_IN_GRAD, NONLINEAR

Tensor = torch.Tensor


# ---- words: 32 random bits for each element ------------------------------------------------------


def words(
    draw: Tensor, seed: int, stream: str, shape: Shape, slices: Slices | None, word: int = 0
) -> Tensor:
    """Draw 32 random bits, as int32, for each element of the slices of a logical tensor.

    draw: int64 scalar, the number of the micro-batch.
    seed, stream: of the run; of the op.
    shape: of the logical tensor.
    slices: of it; None: all of it.
    word: another one gives other numbers of the same stream.

    An element's place inside its row of dim 0 meets a key of the row, 64 bits of it, so that no two
    rows of a run are alike; a row has fewer than 2^32 elements.
    """
    held = tuple((0, size) for size in shape) if slices is None else slices
    (first, rows), *inside = held or ((0, 1),)
    column_key, *row_keys = _keys(seed, stream, word)
    device = draw.device
    column = _mix(_places(shape[1:], inside, device) ^ column_key)
    low = draw.to(torch.int32)
    key = _mix(torch.stack([low + each for each in row_keys]))  # no copy to the device: arguments
    row = _mix(key[:, None] + torch.arange(first, first + rows, dtype=torch.int32, device=device))
    one, other = row.reshape(2, rows, *(1 for _ in inside))
    return _mix((column ^ one).add_(other)).reshape([length for _, length in held])


@cache
def _keys(seed: int, stream: str, word: int) -> tuple[int, int, int]:
    digest = hashlib.blake2b(f"{seed} {word} {stream}".encode(), digest_size=12).digest()
    return struct.unpack("<3i", digest)


def _places(shape: Shape, slices: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Row-major places of the slices, int32."""
    place = torch.zeros((), dtype=torch.int32, device=device)
    for size, (start, length) in zip(shape, slices, strict=True):
        along = torch.arange(start, start + length, dtype=torch.int32, device=device)
        place = place[..., None] * size + along
    return place


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that scatters them, in place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97 - 2**32)):
        _xor_shift(x, shift).mul_(factor)
    return _xor_shift(x, 15)


def _xor_shift(x: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, filled with zeros from above."""
    return x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (32 - shift) - 1))


# ---- functions -----------------------------------------------------------------------------------


def dropout_mask(
    draw: Tensor, seed: int, stream: str, shape: Shape, p: float, *, slices: Slices | None = None
) -> Tensor:
    """Draw a mask: False, which drops, with probability `p`.  Other arguments: see words."""
    drawn = words(draw, seed, stream, shape, slices)
    if p >= 1:
        return torch.zeros_like(drawn, dtype=torch.bool)
    return drawn >= int(p * 2**32) - 2**31


def uniform(
    draw: Tensor,
    seed: int,
    stream: str,
    shape: Shape,
    *,
    dtype: torch.dtype,
    slices: Slices | None = None,
    word: int = 0,
) -> Tensor:
    """Draw from [0, 1), in as many steps as the dtype distinguishes below 1.

    draw, seed, stream, shape, slices, word: see words.
    """
    bits = min(31, 1 - int(math.log2(torch.finfo(dtype).eps)))
    drawn = words(draw, seed, stream, shape, slices, word) >> (32 - bits)
    return drawn.bitwise_and_(2**bits - 1).to(dtype).mul_(2.0**-bits)


def normal(
    draw: Tensor,
    seed: int,
    stream: str,
    shape: Shape,
    *,
    dtype: torch.dtype,
    slices: Slices | None = None,
) -> Tensor:
    """Draw with mean 0 and deviation 1 (Box and Muller 1958).

    draw, seed, stream, shape, slices: see words.  dtype: of the result.
    """
    wide = torch.promote_types(dtype, torch.float32)
    radius, angle = (
        uniform(draw, seed, stream, shape, dtype=wide, slices=slices, word=k) for k in range(2)
    )
    radius = torch.log1p(-radius).mul_(-2).sqrt_()
    return angle.mul_(2 * math.pi).cos_().mul_(radius).to(dtype)


def integers(
    draw: Tensor,
    seed: int,
    stream: str,
    shape: Shape,
    low: int,
    high: int,
    *,
    dtype: torch.dtype,
    slices: Slices | None = None,
) -> Tensor:
    """Draw whole numbers from [low, high).

    draw, seed, stream, shape, slices: see words.  dtype: of the result.
    """
    wide = _wide(draw, seed, stream, shape, slices)
    return wide.remainder_(high - low).add_(low).to(dtype)


def permutation(
    draw: Tensor,
    seed: int,
    stream: str,
    shape: Shape,
    *,
    dtype: torch.dtype,
    slices: Slices | None = None,
) -> Tensor:
    """Draw the numbers below shape[0] in random order, which is drawn whole, then cut to `slices`.

    draw, seed, stream: see words.  dtype: of the result.
    """
    order = _wide(draw, seed, stream, shape, None).argsort(stable=True).to(dtype)
    return order if slices is None else order.narrow(0, *slices[0])


def _wide(draw: Tensor, seed: int, stream: str, shape: Shape, slices: Slices | None) -> Tensor:
    """int64 from [0, 2^62)."""
    high, low = (words(draw, seed, stream, shape, slices, k).long() & 2**31 - 1 for k in range(2))
    return high << 31 | low


# ---- signatures: any dim can be made split; not "B -> P": a sum of draws is not a draw -----------


def local_draw(view: LocalView) -> LocalCall:
    """The slices that this rank holds."""
    op = view.op
    return LocalCall(_FUNCTIONS[op.target], op.args, (*op.kwargs, ("slices", view.out_slices[0])))


DROPOUT_MASK, UNIFORM, NORMAL = "flow.dropout_mask", "flow.uniform", "flow.normal"
INTEGERS, PERMUTATION = "flow.integers", "flow.permutation"
_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    DROPOUT_MASK: dropout_mask,
    UNIFORM: uniform,
    NORMAL: normal,
    INTEGERS: integers,
    PERMUTATION: permutation,
}
# Bytes that a hash moves, some 15 torch ops over 32-bit words, and the normal distribution's two.
_SCRATCH_BYTES = {DROPOUT_MASK: 120.0, NORMAL: 300.0}

OPS: Mapping[str, OpInfo] = {
    **{
        target: OpInfo(
            NONLINEAR,
            local=local_draw,
            function=function,
            traits=(Trait.ROW_STATISTICS,) if target == DROPOUT_MASK else (),
            cost=OpCost(scratch_bytes=_SCRATCH_BYTES.get(target, 0.0)),
        )
        for target, function in _FUNCTIONS.items()
    },
    "aten.native_dropout.default": OpInfo(traits=(Trait.ROW_STATISTICS,)),
    "aten.native_dropout_backward.default": OpInfo(LINEAR_IN_GRAD, traits=(Trait.ROW_STATISTICS,)),
}
