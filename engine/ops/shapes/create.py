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
from flowrun.engine.ir.signature import (
    Function,
    Local,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Signature,
)
from flowrun.engine.ops.math.pointwise import NONLINEAR


def like(view: OpView) -> OpRows:
    """The output follows the input's split; the values are not read, so P in gives B out."""
    dims = range(len(view.in_shapes[0]))
    return (*(Signature((S(d),), (S(d),)) for d in dims), Signature((P,), (B,)))


def new(view: OpView) -> OpRows:
    """Only dtype and device of the input are read: any SBP in, any dim split out."""
    ins: list[Sbp] = [B, P, *(S(d) for d in range(len(view.in_shapes[0])))]
    outs: list[Sbp] = [B, *(S(d) for d in range(len(view.out_shapes[0] or ())))]
    return tuple(Signature((a,), (b,)) for a in ins for b in outs)


def _filled_by(function: Function, *names: str) -> Local:
    """A rank makes the local shape; names: arguments of the op that follow it."""

    def local(view: LocalView) -> LocalCall:
        args = (view.made_shape, *(view.given[name] for name in names))
        return LocalCall(function, args, _dtype_argument(view))

    return local


def _local_scalar(view: LocalView) -> LocalCall:
    return LocalCall(torch.scalar_tensor, (view.given["s"],), _dtype_argument(view))


def local_arange(view: LocalView) -> LocalCall:
    """A rank counts from start + step * offset on, for the local length."""
    given, (offset, length) = view.given, view.made[0]
    start, step = given.get("start", 0), given.get("step", 1)
    whole = all(isinstance(n, int) for n in (start, given["end"], step))
    dtype = given["dtype"] or (torch.int64 if whole else torch.get_default_dtype())
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


def _dtype_argument(view: LocalView) -> tuple[tuple[str, object], ...]:
    dtype = view.given.get("dtype")
    return () if dtype is None else (("dtype", dtype),)


def local_constant(view: LocalView) -> LocalCall:
    """The numbers that lie here."""
    numbers, shape = view.op.args
    return LocalCall(constant, (numbers, shape, view.made), view.op.kwargs)


def constant(
    numbers: Sequence[float], shape: Shape, slices: Slices = (), *, dtype: torch.dtype
) -> torch.Tensor:
    """Return slices of the tensor of these numbers; without slices all of it."""
    whole = torch.tensor(numbers, dtype=dtype).reshape(tuple(shape))
    return whole[tuple(slice(start, start + length) for start, length in slices)]


CONSTANT, FULL = "flow.constant", "aten.full.default"
_ARANGE, _LIKE = OpInfo(NONLINEAR, local=local_arange), OpInfo(like)
_NEW = OpInfo(new, local=lambda view: view.rebind(size=view.made_shape))

OPS: Mapping[str, OpInfo] = {
    CONSTANT: OpInfo(NONLINEAR, local=local_constant, function=constant, traits=(Trait.CONSTANT,)),
    FULL: OpInfo(NONLINEAR, local=_filled_by(torch.full, "fill_value")),
    "aten.zeros.default": OpInfo(NONLINEAR, local=_filled_by(torch.zeros)),
    "aten.ones.default": OpInfo(NONLINEAR, local=_filled_by(torch.ones)),
    "aten.scalar_tensor.default": OpInfo(NONLINEAR, local=_local_scalar),
    **{f"aten.arange.{name}": _ARANGE for name in ("default", "start", "start_step")},
    **{f"aten.{name}_like.default": _LIKE for name in ("zeros", "ones", "full")},
    "aten.fill.Scalar": _LIKE,
    **{f"aten.new_{name}.default": _NEW for name in ("zeros", "ones", "full")},
}
