"""Signatures of ops that read or write at positions that another tensor says: index, gather.

What is looked up passes P.  A dim along which positions count passes no split, the others do, and
so do the dims of the positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import INDICES, LookUp, OpInfo, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S, Split
from flowrun.engine.ir.signature import (
    Labels,
    OpRows,
    OpView,
    Signature,
    dims_but,
    labelled_rows,
    whole,
)


def _beside(view: OpView) -> tuple[int, Labels]:
    """(`dim`, labels of the other dims that are as long in all operands)."""
    shape, *others = view.in_shapes
    at = view.given["dim"] % max(len(shape), 1)
    alike = (d != at and all(other[d] == n for other in others) for d, n in enumerate(shape))
    return at, tuple(d if same else None for d, same in enumerate(alike))


def gather(view: OpView) -> OpRows:
    """gather along `dim`: another dim splits both where it is as long in the index; P of the values
    passes.

    Where the index is shorter, it meets the first elements only, which lie on the first ranks.
    """
    if not view.in_shapes[0]:
        return ()
    at, own = _beside(view)
    positions: Labels = (*own[:at], "i", *own[at + 1 :])
    return (*labelled_rows([own, positions], [positions]), Signature((P, B), (P,)))


def scatter_add(view: OpView) -> OpRows:
    """src added into self along `dim`, at the positions of the index: the gradient of a gather.

    Another dim splits all three where they are as long.  Linear in self and src together; parts of
    the index along `dim` make parts of the sum.
    """
    _, index, source = view.in_shapes
    if not index:
        return ()
    at, own = _beside(view)
    legal = (*labelled_rows([own] * 3, [own]), Signature((P, B, P), (P,)))
    return (*legal, Signature((P, S(at), S(at)), (P,))) if index[at] == source[at] else legal


def index_add(view: OpView) -> OpRows:
    """Rows of source added into self along `dim`, at the positions of the index: the gradient of an
    index_select.

    Another dim splits self and source.  Linear in both together; parts of the index and of the
    rows make parts of the sum.
    """
    ndim = len(view.in_shapes[0])
    if not ndim:
        return ()
    at = view.given["dim"] % ndim
    own = dims_but(ndim, at)
    parts = (Signature((P, B, P), (P,)), Signature((P, S(0), S(at)), (P,)))
    return (*labelled_rows([own, (None,), own], [own]), *parts)


def index_select(view: OpView) -> OpRows:
    """index_select along `dim`: other dims pass their split, and so do the indices, to `dim`."""
    ndim = len(view.in_shapes[0])
    at = view.given["dim"] % ndim
    own = dims_but(ndim, at)
    out: Labels = tuple("i" if d == at else d for d in range(ndim))
    return (*labelled_rows([own, ("i",)], [out]), Signature((P, B), (P,)))


def _label_indices(
    view: OpView,
) -> tuple[Labels, Labels, list[Labels], dict[int | str | None, int]]:
    """Labels of an op on x[indices]: of x, of the positions and x's other dims together, of each
    index; and the length that each label has.

    Indices are broadcast against each other; their dims stand where the first named dim was, or in
    front where whole dims lie between two that are named.
    """
    shape, at = view.in_shapes[0], _indexed_dims(view.op)
    indices = view.in_shapes[1 : 1 + len(at)]
    positions = torch.broadcast_shapes(*indices)
    names = tuple(f"i{d}" for d in range(len(positions)))
    before = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    own = dims_but(len(shape), *at)
    kept = [d for d in own if d is not None]
    lengths: dict[int | str | None, int] = {d: n for d, n in enumerate(shape) if d not in at}
    lengths.update(zip(names, positions, strict=True))
    inner = [_align(i, positions) for i in indices]
    return own, (*kept[:before], *names, *kept[before:]), inner, lengths


def index(view: OpView) -> OpRows:
    """x[indices]: dims of x that no index names, and dims of the indices, pass their split."""
    own, out, inner, _ = _label_indices(view)
    return (*labelled_rows([own, *inner], [out]), view.row({"self": P}, P))


def index_put(view: OpView) -> OpRows:
    """x with values put at, or added at, indices: linear in x and the values together.

    Dims of x that no index names pass their split.  Added values can come in parts, split along a
    dim of the indices: the parts add up, if x is one of the addends.
    """
    own, whole, inner, lengths = _label_indices(view)
    values = view.in_shapes[-1]
    given = whole[len(whole) - len(values) :]
    put: Labels = tuple(
        label if n == lengths[label] else None for label, n in zip(given, values, strict=True)
    )
    rows = [*labelled_rows([own, *[()] * len(inner), put], [own])]
    rows = [r for r in rows if isinstance(r.inputs[0], Split)]
    if view.given["accumulate"]:
        names = [label for label in whole if isinstance(label, str)]
        for each in labelled_rows([own, *inner, put], [own], dict.fromkeys(names, P)):
            if each.outputs == (P,):
                rows.append(Signature((P, *each.inputs[1:]), (P,)))
    return (*rows, view.row({"self": P, "values": P}, P))


def scatter_src(view: OpView) -> OpRows:
    """x with src put at an index along `dim`: other dims, as long in all three, pass their split;
    linear in x and src together.
    """
    _, own = _beside(view)
    return (*labelled_rows([own] * 3, [own]), view.row({"self": P, "src": P}, P))


def _indexed_dims(op: Op) -> list[int]:
    """Dims of x that an index names."""
    return [d for d, index in enumerate(op.args[1]) if index is not None]


def _align(shape: Shape, positions: Shape) -> Labels:
    """Labels of an index: the dim of the broadcast indices that each of its dims is."""
    shift = len(positions) - len(shape)
    return tuple(
        None if size == 1 and positions[shift + d] != 1 else f"i{shift + d}"
        for d, size in enumerate(shape)
    )


# A value of its own for each place of a mask, in order: which rank has which value is known only
# when the mask is.
PUT_UNDER_MASK = "flow.put_under_mask"

_ALONG_DIM = LookUp(table="self", ids="index", dim="dim", words=INDICES)

OPS: Mapping[str, OpInfo] = {
    "aten.gather.default": OpInfo(gather, looks_up=_ALONG_DIM),
    "aten.scatter_add.default": OpInfo(scatter_add, traits=(Trait.PLAIN,), looks_up=_ALONG_DIM),
    "aten.index_add.default": OpInfo(index_add, looks_up=_ALONG_DIM),
    "aten.index_select.default": OpInfo(index_select, looks_up=_ALONG_DIM),
    "aten.index.Tensor": OpInfo(index),
    "aten.index_put.default": OpInfo(index_put),
    "aten.scatter.src": OpInfo(scatter_src, looks_up=_ALONG_DIM),
    "aten.scatter.value": OpInfo(looks_up=_ALONG_DIM),
    PUT_UNDER_MASK: OpInfo(whole, function=torch.ops.aten.index_put.default),
}
