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
    OpView,
    Signature,
    bind,
    dims_but,
    labelled_rows,
    row,
    whole,
)


def gather(view: OpView) -> tuple[Signature, ...]:
    """gather along `dim`: another dim splits both where it is as long in the index; P of the values
    passes.

    Where the index is shorter, it meets the first elements only, which lie on the first ranks.
    """
    shape, index = view.in_shapes
    if not shape:
        return ()
    at = bind(view.op)["dim"] % len(shape)
    own = dims_but(len(shape), at, *(d for d, n in enumerate(shape) if n != index[d]))
    positions: Labels = tuple("i" if d == at else own[d] for d in range(len(shape)))
    return (*labelled_rows([own, positions], [positions]), Signature((P, B), (P,)))


def scatter_add(view: OpView) -> tuple[Signature, ...]:
    """src added into self along `dim`, at the positions of the index: the gradient of a gather.

    Another dim splits all three where they are as long.  Linear in self and src together; parts of
    the index along `dim` make parts of the sum.
    """
    shape, index, source = view.in_shapes
    if not shape:
        return ()
    at = bind(view.op)["dim"] % len(shape)
    own: Labels = tuple(
        d if d != at and shape[d] == index[d] == source[d] else None for d in range(len(shape))
    )
    legal = (*labelled_rows([own] * 3, [own]), Signature((P, B, P), (P,)))
    return (*legal, Signature((P, S(at), S(at)), (P,))) if index[at] == source[at] else legal


def index_add(view: OpView) -> tuple[Signature, ...]:
    """Rows of source added into self along `dim`, at the positions of the index: the gradient of an
    index_select.

    Another dim splits self and source.  Linear in both together; parts of the index and of the
    rows make parts of the sum.
    """
    ndim = len(view.in_shapes[0])
    if not ndim:
        return ()
    at = bind(view.op)["dim"] % ndim
    own = dims_but(ndim, at)
    partial = Signature((P, B, P), (P,)), Signature((P, S(0), S(at)), (P,))
    return (*labelled_rows([own, (None,), own], [own]), *partial)


def index_select(view: OpView) -> tuple[Signature, ...]:
    """index_select along `dim`: other dims pass their split, and so do the indices, to `dim`."""
    ndim = len(view.in_shapes[0])
    at = bind(view.op)["dim"] % ndim
    own = dims_but(ndim, at)
    out: Labels = tuple("i" if d == at else d for d in range(ndim))
    return (*labelled_rows([own, ("i",)], [out]), Signature((P, B), (P,)))


def index(view: OpView) -> tuple[Signature, ...]:
    """x[indices]: dims of x that no index names, and dims of the indices, pass their split.

    Indices are broadcast against each other; their dims stand where the first named dim was, or in
    front where whole dims lie between two that are named.
    """
    op, at = view.op, _indexed_dims(view.op)
    shape, *indices = view.in_shapes
    positions = torch.broadcast_shapes(*indices)
    names = tuple(f"i{d}" for d in range(len(positions)))
    inner = [_align(i, positions) for i in indices]
    own = dims_but(len(shape), *at)
    together = at == list(range(at[0], at[-1] + 1))
    before = at[0] if together else 0
    kept = [d for d in own if d is not None]
    out: Labels = (*kept[:before], *names, *kept[before:])
    return (*labelled_rows([own, *inner], [out]), row(op, {"self": P}, P))


def index_put(view: OpView) -> tuple[Signature, ...]:
    """x with values put at, or added at, indices: linear in x and the values together.

    Dims of x that no index names pass their split.  Added values can come in parts, split along a
    dim of the indices: the parts add up, if x is one of the addends.
    """
    op, at = view.op, _indexed_dims(view.op)
    shape, *indices, values = view.in_shapes
    positions = torch.broadcast_shapes(*indices)
    names = tuple(f"i{d}" for d in range(len(positions)))
    together = at == list(range(at[0], at[-1] + 1))
    before = at[0] if together else 0
    own = dims_but(len(shape), *at)
    kept = [d for d in own if d is not None]
    whole: Labels = (*kept[:before], *names, *kept[before:])
    sizes: dict[int | str | None, int] = {
        **dict(zip(names, positions, strict=True)),
        **{d: n for d, n in enumerate(shape) if d not in at},
    }
    given = whole[len(whole) - len(values) :]
    put: Labels = tuple(
        label if n == sizes[label] else None for label, n in zip(given, values, strict=True)
    )
    inner = [_align(i, positions) for i in indices]
    rows = [*labelled_rows([own, *[()] * len(indices), put], [own])]
    rows = [r for r in rows if isinstance(r.inputs[0], Split)]
    if bind(op)["accumulate"]:
        for each in labelled_rows([own, *inner, put], [own], dict.fromkeys(names, P)):
            if each.outputs == (P,):
                rows.append(Signature((P, *each.inputs[1:]), (P,)))
    return (*rows, row(op, {"self": P, "values": P}, P))


def scatter_src(view: OpView) -> tuple[Signature, ...]:
    """x with src put at an index along `dim`: other dims, as long in all three, pass their split;
    linear in x and src together.
    """
    shape, positions, source = view.in_shapes
    at = bind(view.op)["dim"] % max(len(shape), 1)
    own: Labels = tuple(
        None if d == at or not n == positions[d] == source[d] else d for d, n in enumerate(shape)
    )
    return (*labelled_rows([own] * 3, [own]), row(view.op, {"self": P, "src": P}, P))


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
