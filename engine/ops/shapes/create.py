"""Signatures of ops that make a tensor out of constants, or out of nothing but another tensor's
shape.

Each rank makes what it holds: sizes are rewritten to the local ones, and arange starts at the
rank's offset. No "-> P" for a constant: a sum of it over ranks is another constant. Devices are
left to torch's default device, so that one graph serves every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import LocalCall, LocalView, OpView, Signature, bind, rebind, sizes


def from_nothing(view: OpView) -> tuple[Signature, ...]:
    """Any dim can be made split."""
    return tuple(Signature((), (S(d),)) for d in range(len(view.out_shapes[0] or ())))


def like(view: OpView) -> tuple[Signature, ...]:
    """The output follows the input's split; the values are not read, so P in gives B out."""
    dims = range(len(view.in_shapes[0]))
    return (*(Signature((S(d),), (S(d),)) for d in dims), Signature((P,), (B,)))


def new(view: OpView) -> tuple[Signature, ...]:
    """Only dtype and device of the input are read: any SBP in, any dim split out."""
    ins: list[Sbp] = [B, P, *(S(d) for d in range(len(view.in_shapes[0])))]
    outs: list[Sbp] = [B, *(S(d) for d in range(len(view.out_shapes[0] or ())))]
    return tuple(Signature((a,), (b,)) for a in ins for b in outs)


def local_full(view: LocalView) -> LocalCall:
    """A rank fills the local shape."""
    given = bind(view.op)
    return LocalCall(torch.full, (sizes(view.made), given["fill_value"]), _dtype_argument(view))


def local_zeros(view: LocalView) -> LocalCall:
    """A rank makes the local shape."""
    return LocalCall(torch.zeros, (sizes(view.made),), _dtype_argument(view))


def local_ones(view: LocalView) -> LocalCall:
    """A rank makes the local shape."""
    return LocalCall(torch.ones, (sizes(view.made),), _dtype_argument(view))


def local_scalar(view: LocalView) -> LocalCall:
    """The same everywhere."""
    return LocalCall(torch.scalar_tensor, (bind(view.op)["s"],), _dtype_argument(view))


def local_new(view: LocalView) -> LocalCall:
    """A rank makes the local shape."""
    return rebind(view.op, size=sizes(view.made))


def local_arange(view: LocalView) -> LocalCall:
    """A rank counts from start + step * offset on, for the local length."""
    given, (offset, length) = bind(view.op), view.made[0]
    start, step = given.get("start", 0), given.get("step", 1)
    dtype = given["dtype"] or _number_type(start, given["end"], step)
    return LocalCall(count_up, (start, step, offset, length), (("dtype", dtype),))


def count_up(
    start: float, step: float, offset: int, length: int, *, dtype: torch.dtype
) -> torch.Tensor:
    """Return start + step * k for k in [offset, offset + length), in `dtype`.

    Whole numbers are made of whole ones, as torch does whatever was written: arange(6, -6, -1.0).
    Of fractions the end lies half a step beyond the last, so that rounding adds none.
    """
    if length == 0:
        return torch.empty(0, dtype=dtype)
    whole = not dtype.is_floating_point
    if whole:
        start, step = int(start), int(step)
    first, last = start + step * offset, start + step * (offset + length - 1)
    return torch.arange(first, last + (step if whole else step / 2), step, dtype=dtype)


def _number_type(*numbers: float) -> torch.dtype:
    return torch.int64 if all(isinstance(n, int) for n in numbers) else torch.get_default_dtype()


def _dtype_argument(view: LocalView) -> tuple[tuple[str, object], ...]:
    dtype = bind(view.op).get("dtype")
    return () if dtype is None else (("dtype", dtype),)


def local_constant(view: LocalView) -> LocalCall:
    """The numbers that lie here."""
    numbers, shape = view.op.args
    return LocalCall(constant, (numbers, shape, view.made), view.op.kwargs)


def constant(
    numbers: Sequence[float], shape: Shape, slices: Slices = (), *, dtype: torch.dtype
) -> torch.Tensor:
    """Return slices of the tensor of these numbers with this shape and dtype; without slices all of
    it.
    """
    whole = torch.tensor(numbers, dtype=dtype).reshape(tuple(shape))
    return whole[tuple(slice(start, start + length) for start, length in slices)]


CONSTANT, FULL = "flow.constant", "aten.full.default"
_ARANGE, _LIKE = OpInfo(from_nothing, local=local_arange), OpInfo(like)
_NEW = OpInfo(new, local=local_new)

OPS: Mapping[str, OpInfo] = {
    CONSTANT: OpInfo(
        from_nothing, local=local_constant, function=constant, traits=(Trait.CONSTANT,)
    ),
    FULL: OpInfo(from_nothing, local=local_full),
    "aten.zeros.default": OpInfo(from_nothing, local=local_zeros),
    "aten.ones.default": OpInfo(from_nothing, local=local_ones),
    "aten.scalar_tensor.default": OpInfo(from_nothing, local=local_scalar),
    "aten.arange.default": _ARANGE,
    "aten.arange.start": _ARANGE,
    "aten.arange.start_step": _ARANGE,
    "aten.zeros_like.default": _LIKE,
    "aten.ones_like.default": _LIKE,
    "aten.full_like.default": _LIKE,
    "aten.fill.Scalar": _LIKE,
    "aten.new_zeros.default": _NEW,
    "aten.new_ones.default": _NEW,
    "aten.new_full.default": _NEW,
}
