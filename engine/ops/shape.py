"""Signatures of ops that move elements without computing: views, transposes, slices, joins.

All are linear, so P passes.  Each says which output dim an input dim becomes; a dim that is cut,
joined or mixed with another passes no split.  Sizes among the arguments are rewritten to what the
rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from flowrun.engine.graph import Op
from flowrun.engine.ops.signature import (
    Call,
    Labels,
    Local,
    LocalView,
    OpView,
    Rule,
    Signature,
    bind,
    labelled,
    rebound,
    row,
    sizes,
    torch_callable,
)
from flowrun.engine.placement import Shape
from flowrun.engine.sbp import B, P, S, Split

# ---- views ---------------------------------------------------------------------------------------


def dim_groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest groups of consecutive dims of equal volume on both sides of a view; dims of size 1
    belong to none.
    """
    ins = [d for d, size in enumerate(source) if size != 1]
    outs = [d for d, size in enumerate(target) if size != 1]
    while ins and outs:
        left, right = [ins.pop(0)], [outs.pop(0)]
        while (a := math.prod(source[d] for d in left)) != (
            b := math.prod(target[d] for d in right)
        ):
            if not (side := ins if a < b else outs):
                return  # a tensor without elements
            (left if a < b else right).append(side.pop(0))
        yield left, right


def regroup(view: OpView) -> tuple[Signature, ...]:
    """Rows of view: a group of dims passes the split of its first dim.

    Only the first: pieces of a later dim are strided in the other shape.  Where dims are merged or
    divided, both first dims must divide by the parts, else the pieces end inside a row.
    """
    source, target, parts = view.in_shapes[0], view.out_shapes[0], view.parts
    assert target is not None, f"{view.op.name}: a view without a shape"
    made = [Signature((P,), (P,))]
    for left, right in dim_groups(source, target):
        a, b = left[0], right[0]
        alone = len(left) == len(right) == 1
        if alone or (source[a] % parts == 0 and target[b] % parts == 0):
            made.append(Signature((S(a),), (S(b),)))
    return tuple(made)


def local_view(view: LocalView) -> Call:
    """To the local shape; reshape, because a part that came out of a boxing may be strided
    otherwise.
    """
    return Call(torch_callable("aten.reshape.default"), (view.op.args[0], _made(view)))


def _made(view: LocalView) -> Shape:
    made = view.out_slices[0]
    assert made is not None, f"{view.op.name}: its only output is unused"
    return sizes(made)


# ---- one dim becomes another ---------------------------------------------------------------------


def moved(in_labels: Labels, out_labels: Labels, view: OpView) -> tuple[Signature, ...]:
    """Rows of an op of one tensor whose dims keep their meaning, and P -> P."""
    count = len(view.op.outputs)
    return (*labelled([in_labels], [out_labels] * count), Signature((P,), (P,) * count))


def transpose(view: OpView) -> tuple[Signature, ...]:
    """t, transpose, permute: a dim passes its split to where it goes."""
    ndim, given = len(view.in_shapes[0]), bind(view.op)
    order = list(range(ndim))
    if "dims" in given:
        order = [d % ndim for d in given["dims"]]
    elif "dim0" in given and ndim:
        a, b = given["dim0"] % ndim, given["dim1"] % ndim
        order[a], order[b] = b, a
    elif "dim0" not in given:
        order.reverse()
    return moved(tuple(range(ndim)), tuple(order), view)


def expand(view: OpView) -> tuple[Signature, ...]:
    """expand: a dim of full size passes its split; a new or widened dim can be made split from a
    whole input.
    """
    source, target = view.in_shapes[0], view.out_shapes[0]
    assert target is not None, f"{view.op.name}: an expand without a shape"
    shift = len(target) - len(source)
    widened = [d for d, n in enumerate(target) if d < shift or source[d - shift] != n]
    own = tuple(None if shift + d in widened else shift + d for d in range(len(source)))
    return moved(own, tuple(range(len(target))), view)


def local_expand(view: LocalView) -> Call:
    """To the local shape."""
    return rebound(view.op, size=_made(view))


def unsqueeze(view: OpView) -> tuple[Signature, ...]:
    """unsqueeze: the new dim has size 1 and no split."""
    ndim = len(view.in_shapes[0])
    at = bind(view.op)["dim"] % (ndim + 1)
    return moved(tuple(range(ndim)), (*range(at), None, *range(at, ndim)), view)


def squeeze(view: OpView) -> tuple[Signature, ...]:
    """squeeze: dims of size 1 go, the others pass their split."""
    shape, out = view.in_shapes[0], view.out_shapes[0]
    dim = bind(view.op).get("dim", range(len(shape)))
    named = {d % len(shape) for d in ((dim,) if isinstance(dim, int) else dim)} if shape else set()
    kept = tuple(d for d, size in enumerate(shape) if size != 1 or d not in named)
    if out is not None and len(kept) != len(
        out
    ):  # a dim that the axes before have cut to 1 is not squeezed
        return (Signature((P,), (P,)),)
    return moved(tuple(range(len(shape))), kept, view)


def local_squeeze(view: LocalView) -> Call:
    """squeeze without dims would also take a dim of which this rank holds one element: the logical
    dims are named.
    """
    op, shape = view.op, view.in_shapes[0]
    dim = bind(op).get("dim", range(len(shape)))
    named = [d % len(shape) for d in ((dim,) if isinstance(dim, int) else dim)] if shape else []
    ones = tuple(d for d in named if shape[d] == 1)
    return Call(torch_callable("aten.squeeze.dims"), (op.args[0], ones))


def select(view: OpView) -> tuple[Signature, ...]:
    """select, unbind: the dim goes, the others pass their split.

    Not the selected dim: one rank alone would hold it.
    """
    ndim = len(view.in_shapes[0])
    at = bind(view.op)["dim"] % ndim
    own: Labels = tuple(None if d == at else d for d in range(ndim))
    return moved(own, tuple(d for d in range(ndim) if d != at), view)


def cut(view: OpView) -> tuple[Signature, ...]:
    """slice, split, flip and the like along one or some dims: the others pass their split."""
    shape = view.in_shapes[0]
    touched = {d % len(shape) for d in _touched(view)} if shape else set()
    own: Labels = tuple(None if d in touched else d for d in range(len(shape)))
    return moved(own, own, view)


def _touched(view: OpView) -> Sequence[int]:
    given, target, shape = bind(view.op), view.op.target, view.in_shapes[0]
    if target == "aten.slice.Tensor":
        whole = given["start"] in (0, None) and given["step"] == 1
        whole = whole and (given["end"] is None or given["end"] >= shape[given["dim"]])
        return () if whole and view.out_shapes[0] == shape else (given["dim"],)
    if target in ("aten.tril.default", "aten.triu.default"):
        return (-2, -1)  # the diagonal lies elsewhere in a part
    dims = given.get("dim", given.get("dims"))
    return (dims,) if isinstance(dims, int) else dims or range(len(shape))


def pad(view: OpView) -> tuple[Signature, ...]:
    """constant_pad_nd: unpadded dims pass their split; P only when padded with zeros."""
    ndim, given = len(view.in_shapes[0]), bind(view.op)
    amounts = given["pad"]
    padded = {ndim - 1 - k // 2 for k, amount in enumerate(amounts) if amount != 0}
    own: Labels = tuple(None if d in padded else d for d in range(ndim))
    return moved(own, own, view) if given["value"] == 0 else labelled([own], [own])


def repeat(view: OpView) -> tuple[Signature, ...]:
    """repeat: a dim repeated once passes its split."""
    repeats, ndim = bind(view.op)["repeats"], len(view.in_shapes[0])
    shift = len(repeats) - ndim
    own: Labels = tuple(shift + d if repeats[shift + d] == 1 else None for d in range(ndim))
    return moved(own, tuple(d if d in own else None for d in range(len(repeats))), view)


# ---- several tensors -----------------------------------------------------------------------------


def cat(view: OpView) -> tuple[Signature, ...]:
    """cat: dims that are not joined pass their split.

    Not the joined dim: pieces of the parts would interleave.
    """
    count, ndim = len(view.in_shapes), max(map(len, view.in_shapes))
    partial = Signature((P,) * count, (P,))
    if any(len(shape) != ndim for shape in view.in_shapes):
        return (partial,)  # old habit: empty 1-D tensors are skipped
    at = bind(view.op)["dim"] % ndim
    own: Labels = tuple(None if d == at else d for d in range(ndim))
    return (*labelled([own] * count, [own]), partial)


def stack(view: OpView) -> tuple[Signature, ...]:
    """stack: every dim passes its split to where it goes."""
    count, ndim = len(view.in_shapes), len(view.in_shapes[0])
    at = bind(view.op)["dim"] % (ndim + 1)
    out: Labels = (*range(at), None, *range(at, ndim))
    return (*labelled([tuple(range(ndim))] * count, [out]), Signature((P,) * count, (P,)))


# ---- their gradients -----------------------------------------------------------------------------


def slice_backward(view: OpView) -> tuple[Signature, ...]:
    """Zeros with the gradient put in along `dim`: the other dims pass their split."""
    target = view.out_shapes[0]
    assert target is not None, f"{view.op.name}: its only output is unused"
    ndim = len(target)
    at = bind(view.op)["dim"] % ndim
    out: Labels = tuple(None if d == at else d for d in range(ndim))
    removed = view.op.target == "aten.select_backward.default"
    return moved(tuple(d for d in range(ndim) if d != at) if removed else out, out, view)


def local_slice_backward(view: LocalView) -> Call:
    """Into zeros of the local shape."""
    return rebound(view.op, input_sizes=_made(view))


def scatter(view: OpView) -> tuple[Signature, ...]:
    """slice_scatter, select_scatter: src put into self along `dim`; the other dims split both."""
    ndim = len(view.in_shapes[0])
    at = bind(view.op)["dim"] % ndim
    own: Labels = tuple(None if d == at else d for d in range(ndim))
    removed = view.op.target == "aten.select_scatter.default"
    source = tuple(d for d in range(ndim) if d != at) if removed else own
    return (*labelled([own, source], [own]), Signature((P, P), (P,)))


def gather(view: OpView) -> tuple[Signature, ...]:
    """gather along `dim`: another dim splits both where it is as long in the index; P of the values
    passes.

    Where the index is shorter, it meets the first elements only, which lie on the first ranks.
    """
    shape, index = view.in_shapes
    if not shape:
        return ()
    at = bind(view.op)["dim"] % len(shape)
    own: Labels = tuple(None if d == at or shape[d] != index[d] else d for d in range(len(shape)))
    positions: Labels = tuple("i" if d == at else own[d] for d in range(len(shape)))
    return (*labelled([own, positions], [positions]), Signature((P, B), (P,)))


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
    made = (*labelled([own] * 3, [own]), Signature((P, B, P), (P,)))
    return (*made, Signature((P, S(at), S(at)), (P,))) if index[at] == source[at] else made


def index_select(view: OpView) -> tuple[Signature, ...]:
    """index_select along `dim`: other dims pass their split, and so do the indices, to `dim`."""
    ndim = len(view.in_shapes[0])
    at = bind(view.op)["dim"] % ndim
    own: Labels = tuple(None if d == at else d for d in range(ndim))
    out: Labels = tuple("i" if d == at else d for d in range(ndim))
    return (*labelled([own, ("i",)], [out]), Signature((P, B), (P,)))


def index(view: OpView) -> tuple[Signature, ...]:
    """x[indices]: dims of x that no index names, and dims of the indices, pass their split.

    Indices are broadcast against each other; their dims stand where the first named dim was, or in
    front where whole dims lie between two that are named.
    """
    op, at = view.op, _indexed(view.op)
    shape, *indices = view.in_shapes
    positions = torch.broadcast_shapes(*indices)
    names = tuple(f"i{d}" for d in range(len(positions)))
    inner = [_aligned(i, positions) for i in indices]
    own: Labels = tuple(None if d in at else d for d in range(len(shape)))
    together = at == list(range(at[0], at[-1] + 1))
    before = at[0] if together else 0
    kept = [d for d in own if d is not None]
    out: Labels = (*kept[:before], *names, *kept[before:])
    return (*labelled([own, *inner], [out]), row(op, {"self": P}, P))


def index_put(view: OpView) -> tuple[Signature, ...]:
    """x with values put at, or added at, indices: linear in x and the values together.

    Dims of x that no index names pass their split.  Added values can come in parts, split along a
    dim of the indices: the parts add up, if x is one of the addends.
    """
    op, at = view.op, _indexed(view.op)
    shape, *indices, values = view.in_shapes
    positions = torch.broadcast_shapes(*indices)
    names = tuple(f"i{d}" for d in range(len(positions)))
    together = at == list(range(at[0], at[-1] + 1))
    before = at[0] if together else 0
    own: Labels = tuple(None if d in at else d for d in range(len(shape)))
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
    inner = [_aligned(i, positions) for i in indices]
    rows = [*labelled([own, *[()] * len(indices), put], [own])]
    rows = [r for r in rows if isinstance(r.inputs[0], Split)]
    if bind(op)["accumulate"]:
        for made in labelled([own, *inner, put], [own], dict.fromkeys(names, P)):
            if made.outputs == (P,):
                rows.append(Signature((P, *made.inputs[1:]), (P,)))
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
    return (*labelled([own] * 3, [own]), row(view.op, {"self": P, "src": P}, P))


def _indexed(op: Op) -> list[int]:
    """Dims of x that an index names."""
    return [d for d, index in enumerate(op.args[1]) if index is not None]


def _aligned(shape: Shape, positions: Shape) -> Labels:
    """Labels of an index: the dim of the broadcast indices that each of its dims is."""
    shift = len(positions) - len(shape)
    return tuple(
        None if size == 1 and positions[shift + d] != 1 else f"i{shift + d}"
        for d, size in enumerate(shape)
    )


RULES: Mapping[str, Rule] = {
    "aten.view.default": regroup,
    "aten._unsafe_view.default": regroup,
    "aten._reshape_alias.default": regroup,
    "aten.reshape.default": regroup,
    "aten.t.default": transpose,
    "aten.transpose.int": transpose,
    "aten.permute.default": transpose,
    "aten.expand.default": expand,
    "aten.unsqueeze.default": unsqueeze,
    "aten.squeeze.default": squeeze,
    "aten.squeeze.dim": squeeze,
    "aten.squeeze.dims": squeeze,
    "aten.select.int": select,
    "aten.unbind.int": select,
    "aten.slice.Tensor": cut,
    "aten.split.Tensor": cut,
    "aten.split_with_sizes.default": cut,
    "aten.chunk.default": cut,
    "aten.flip.default": cut,
    "aten.roll.default": cut,
    "aten.tril.default": cut,
    "aten.triu.default": cut,
    "aten.constant_pad_nd.default": pad,
    "aten.repeat.default": repeat,
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.slice_backward.default": slice_backward,
    "aten.select_backward.default": slice_backward,
    "aten.slice_scatter.default": scatter,
    "aten.select_scatter.default": scatter,
    "aten.gather.default": gather,
    "aten.scatter_add.default": scatter_add,
    "aten.index_select.default": index_select,
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten.scatter.src": scatter_src,
}

_VIEWS = ("view", "_unsafe_view", "_reshape_alias", "reshape")

LOCALS: Mapping[str, Local] = {
    **{f"aten.{name}.default": local_view for name in _VIEWS},
    "aten.expand.default": local_expand,
    "aten.squeeze.default": local_squeeze,
    "aten.squeeze.dim": local_squeeze,
    "aten.squeeze.dims": local_squeeze,
    "aten.slice_backward.default": local_slice_backward,
    "aten.select_backward.default": local_slice_backward,
}
