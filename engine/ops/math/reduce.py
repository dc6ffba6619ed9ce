"""Signatures of reductions along dims.

A dim that is kept passes its split on.  A split of a reduced dim gives P for a sum or a mean,
P(max) for a maximum, P(logsumexp) for that; none for argmax, variance and the like, which are no
reduction of the parts' own results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpCost, OpInfo, Trait
from flowrun.engine.ir.sbp import P_LOGSUMEXP, P_MAX, P_MIN, P, S, Sbp
from flowrun.engine.ir.signature import (
    Labels,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Rule,
    Signature,
    bind,
    dims_but,
    labelled_rows,
)
from flowrun.engine.ops.math.pointwise import stays_float

LOG2_E = 1 / math.log(2)


def reduced_dims(op: Op, ndim: int) -> frozenset[int]:
    """The dims that the op reduces; all of them where it names none."""
    dim = bind(op).get("dim")
    if dim is None or dim == ():
        return frozenset(range(ndim))
    dims = dim if isinstance(dim, Sequence) else (dim,)
    return frozenset(d % ndim for d in dims) if ndim else frozenset()


def reduction(over: Sbp | None, *, linear: bool = False) -> Rule:
    """Rule of a reduction.

    over: what an output becomes when a reduced dim is split; None: no such row.
    """

    def rule(view: OpView) -> OpRows:
        given, ndim = view.given, len(view.in_shapes[0])
        reduced = reduced_dims(view.op, ndim)
        dims = (d for d in range(ndim) if given.get("keepdim") or d not in reduced)
        out: Labels = tuple(None if d in reduced else d for d in dims)
        contracted = {} if over is None else dict.fromkeys(reduced, over)
        split = labelled_rows([tuple(range(ndim))], [out] * len(view.op.outputs), contracted)
        return (*split, *(view.partial(("self",)) if linear and stays_float(view) else ()))

    return rule


def along(view: OpView) -> OpRows:
    """cumsum, sort, topk, which work along one dim: the other dims pass their split."""
    dims = dims_but(len(view.in_shapes[0]), view.given["dim"])
    return labelled_rows([dims], [dims] * len(view.op.outputs))


def cumsum(view: OpView) -> OpRows:
    """The sum of parts is linear."""
    return (*along(view), *(view.partial(("self",)) if stays_float(view) else ()))


def histogram(view: OpView) -> OpRows:
    """Counts of the parts add up.  Bounds that are equal stand for those of the data: no split."""
    given, ndim = view.given, len(view.in_shapes[0])
    if given["min"] == given["max"]:
        return ()
    return tuple(Signature((S(d),), (P,)) for d in range(ndim))


# ---- local programs ------------------------------------------------------------------------------


def part_of_mean(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool, total: int, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return this rank's addend of a mean of `x` over `total` elements.

    dims, keepdim, dtype: as of torch.mean; a sum of 16-bit numbers leaves what fp16 can hold.
    """
    dtype = dtype or x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    return x.sum(list(dims), keepdim, dtype=wide).div_(total).to(dtype)


def local_mean(view: LocalView) -> LocalCall:
    """A mean of a part divides by the logical count."""
    given, shape = view.given, view.in_shapes[0]
    dims = sorted(reduced_dims(view.op, len(shape)))
    if all(view.in_slices[0][d] == (0, shape[d]) for d in dims):
        return view.rebind()
    total = math.prod(shape[d] for d in dims)
    keepdim = bool(given.get("keepdim"))
    return LocalCall(part_of_mean, (given["self"], tuple(dims), keepdim, total, given["dtype"]))


def log_sum_exp(
    x: torch.Tensor, dims: tuple[int, ...], keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Reduce `dims` of x as aten.logsumexp does, by powers of two, in fp32 at least; keepdim: they
    stay as 1; dtype: of the result, None: that of x.

    On a CPU torch's exp is MKL's, which on processors that are not Intel's takes thrice as long as
    torch's own exp2.
    """
    wide = x if x.dtype.itemsize >= 4 and x.is_floating_point() else x.float()
    most = wide.amax(dims, True)
    most = most.masked_fill_(most.abs() == math.inf, 0)  # a difference of two would be no number
    powers = torch.sub(wide, most).mul_(LOG2_E).exp2_()
    total = powers.sum(dims, True).log_().add_(most)
    total = total.to(dtype or x.dtype) if x.is_floating_point() else total
    return total if keepdim else total.squeeze(dims)


def local_log_sum_exp(view: LocalView) -> LocalCall:
    """A rank runs the same in every layout."""
    given = view.given
    return LocalCall(log_sum_exp, (given["self"], tuple(given["dim"]), given["keepdim"]))


def row_bytes(num_elements: int, itemsize: int) -> int:
    """Return the bytes of powers of two, and of what is narrower than fp32 made wide, of some rows
    at a time (kernels/cpu/row_chunks.py, on two threads of a CPU).
    """
    return min(num_elements * max(itemsize, 4), 1 << 22) * (1 + (itemsize < 4))


SUM = reduction(P, linear=True)
MAX, MIN = reduction(P_MAX), reduction(P_MIN)
COST_OF_LSE = OpCost(
    counted_input=0, held_bytes=lambda op, ins, itemsize: row_bytes(math.prod(ins[0]), itemsize)
)
OTHER = reduction(None)

_OTHER_NAMES = """
    all.default all.dim any.default any.dim argmax.default argmin.default linalg_vector_norm.default
    max.dim min.dim prod.default prod.dim_int std.correction var.correction var_mean.correction
"""

OPS: Mapping[str, OpInfo] = {
    "aten.sum.default": OpInfo(SUM),
    "aten.sum.dim_IntList": OpInfo(SUM, traits=(Trait.ALLOCATES,)),
    "aten.mean.default": OpInfo(SUM, local=local_mean),
    "aten.mean.dim": OpInfo(SUM, local=local_mean),
    "aten.amax.default": OpInfo(MAX, traits=(Trait.ALLOCATES,)),
    "aten.max.default": OpInfo(MAX),
    "aten.amin.default": OpInfo(MIN),
    "aten.min.default": OpInfo(MIN),
    "aten.logsumexp.default": OpInfo(
        reduction(P_LOGSUMEXP), local=local_log_sum_exp, traits=(Trait.ALLOCATES,), cost=COST_OF_LSE
    ),
    **{f"aten.{name}": OpInfo(OTHER) for name in _OTHER_NAMES.split()},
    "aten.histc.default": OpInfo(histogram),
    "aten.cumsum.default": OpInfo(cumsum),
    "aten.sort.default": OpInfo(along),
    "aten.topk.default": OpInfo(along),
}
