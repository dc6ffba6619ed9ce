"""Signatures of ops that cut tensors along a dim, join them, or put a piece back: slices, cat.

All are linear, so P passes.  The dim that is cut or joined passes no split, the others do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.sbp import P
from flowrun.engine.ir.signature import Labels, OpRows, OpView, Signature, dims_but, labelled_rows
from flowrun.engine.ops.shapes.shape import move_dims

# ---- pieces of one tensor ------------------------------------------------------------------------


def select(view: OpView) -> OpRows:
    """select, unbind: the dim goes, the others pass their split.

    Not the selected dim: one rank alone would hold it.
    """
    ndim = len(view.in_shapes[0])
    at = view.given["dim"] % ndim
    return move_dims(dims_but(ndim, at), tuple(d for d in range(ndim) if d != at), view)


def cut(view: OpView) -> OpRows:
    """slice, split, flip and the like along one or some dims: the others pass their split."""
    own = dims_but(len(view.in_shapes[0]), *_touched_dims(view))
    return move_dims(own, own, view)


def _touched_dims(view: OpView) -> Sequence[int]:
    given, target, shape = view.given, view.op.target, view.in_shapes[0]
    if target == "aten.slice.Tensor":
        whole = given["start"] in (0, None) and given["step"] == 1
        whole = whole and (given["end"] is None or given["end"] >= shape[given["dim"]])
        return () if whole and view.out_shapes[0] == shape else (given["dim"],)
    if target in ("aten.tril.default", "aten.triu.default"):
        return (-2, -1)  # the diagonal lies elsewhere in a part
    dims = given.get("dim", given.get("dims"))
    return (dims,) if isinstance(dims, int) else dims or range(len(shape))


def pad(view: OpView) -> OpRows:
    """constant_pad_nd: unpadded dims pass their split; P only when padded with zeros."""
    ndim, given = len(view.in_shapes[0]), view.given
    own = dims_but(ndim, *(ndim - 1 - k // 2 for k, n in enumerate(given["pad"]) if n != 0))
    return move_dims(own, own, view) if given["value"] == 0 else labelled_rows([own], [own])


def repeat(view: OpView) -> OpRows:
    """repeat: a dim repeated once passes its split."""
    repeats, ndim = view.given["repeats"], len(view.in_shapes[0])
    shift = len(repeats) - ndim
    own: Labels = tuple(shift + d if repeats[shift + d] == 1 else None for d in range(ndim))
    return move_dims(own, tuple(d if d in own else None for d in range(len(repeats))), view)


# ---- several tensors -----------------------------------------------------------------------------


def _alike(view: OpView, own: Labels, out: Labels) -> OpRows:
    """Several tensors whose dims pass their split together; P if all are."""
    count = len(view.in_shapes)
    return (*labelled_rows([own] * count, [out]), Signature((P,) * count, (P,)))


def cat(view: OpView) -> OpRows:
    """cat: dims that are not joined pass their split.

    Not the joined dim: pieces of the parts would interleave.
    """
    ndim = max(map(len, view.in_shapes))
    if any(len(shape) != ndim for shape in view.in_shapes):
        return _alike(view, (), ())  # old habit: empty 1-D tensors are skipped
    own = dims_but(ndim, view.given["dim"])
    return _alike(view, own, own)


def stack(view: OpView) -> OpRows:
    """stack: every dim passes its split to where it goes."""
    ndim = len(view.in_shapes[0])
    at = view.given["dim"] % (ndim + 1)
    return _alike(view, tuple(range(ndim)), (*range(at), None, *range(at, ndim)))


# ---- put back ------------------------------------------------------------------------------------


def slice_backward(view: OpView) -> OpRows:
    """Zeros with the gradient put in along `dim`: the other dims pass their split."""
    ndim = len(view.made)
    at = view.given["dim"] % ndim
    out = dims_but(ndim, at)
    removed = view.op.target == "aten.select_backward.default"
    return move_dims(tuple(d for d in range(ndim) if d != at) if removed else out, out, view)


def scatter(view: OpView) -> OpRows:
    """slice_scatter, select_scatter: src put into self along `dim`; the other dims split both."""
    ndim = len(view.in_shapes[0])
    at = view.given["dim"] % ndim
    own = dims_but(ndim, at)
    removed = view.op.target == "aten.select_scatter.default"
    source = tuple(d for d in range(ndim) if d != at) if removed else own
    return (*labelled_rows([own, source], [own]), Signature((P, P), (P,)))


_CUTS = """
    slice.Tensor split.Tensor split_with_sizes.default chunk.default flip.default roll.default
    tril.default triu.default
"""
_BACKWARD = OpInfo(slice_backward, local=lambda view: view.rebind(input_sizes=view.made_shape))

OPS: Mapping[str, OpInfo] = {
    "aten.select.int": OpInfo(select),
    "aten.unbind.int": OpInfo(select),
    **{f"aten.{name}": OpInfo(cut) for name in _CUTS.split()},
    "aten.unsafe_split.Tensor": OpInfo(cut, traits=(Trait.VIEW,)),  # torch hides it
    "aten.constant_pad_nd.default": OpInfo(pad),
    "aten.repeat.default": OpInfo(repeat),
    "aten.cat.default": OpInfo(cat),
    "aten.stack.default": OpInfo(stack),
    "aten.slice_backward.default": _BACKWARD,
    "aten.select_backward.default": _BACKWARD,
    "aten.slice_scatter.default": OpInfo(scatter),
    "aten.select_scatter.default": OpInfo(scatter),
}
