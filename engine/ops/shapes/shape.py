"""Signatures of ops that give the elements of one tensor another shape: views and transposes.

All are linear, so P passes.  Each says which output dim an input dim becomes; a dim that is mixed
with another passes no split.  Sizes among the arguments are rewritten to what the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import P, S
from flowrun.engine.ir.signature import (
    Labels,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Signature,
    labelled_rows,
)

# ---- views ---------------------------------------------------------------------------------------


def dim_groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest groups of dims of equal volume on both sides of a view, without dims of size 1."""
    ins = [d for d, size in enumerate(source) if size != 1]
    outs = [d for d, size in enumerate(target) if size != 1]
    while ins and outs:
        left, right = [ins.pop(0)], [outs.pop(0)]
        a, b = source[left[0]], target[right[0]]
        while a != b:
            if not (side := ins if a < b else outs):
                return  # a tensor without elements
            (left if a < b else right).append(side.pop(0))
            a, b = math.prod(source[d] for d in left), math.prod(target[d] for d in right)
        yield left, right


def regroup(view: OpView) -> OpRows:
    """Rows of view: a group of dims passes the split of its first dim.

    Only the first: pieces of a later dim are strided in the other shape.  Where dims are merged or
    divided, both first dims must divide by the parts, else the pieces end inside a row.
    """
    source, target, parts = view.in_shapes[0], view.made, view.parts
    legal = [Signature((P,), (P,))]
    for left, right in dim_groups(source, target):
        a, b = left[0], right[0]
        alone = len(left) == len(right) == 1
        if alone or (source[a] % parts == 0 and target[b] % parts == 0):
            legal.append(Signature((S(a),), (S(b),)))
    return tuple(legal)


def local_view(view: LocalView) -> LocalCall:
    """A rank reshapes: a part that came out of a boxing may have other strides."""
    return LocalCall(torch.ops.aten.reshape.default, (view.op.args[0], view.made_shape))


# ---- one dim becomes another ---------------------------------------------------------------------


def move_dims(in_labels: Labels, out_labels: Labels, view: OpView) -> OpRows:
    """Return rows of an op of one tensor whose dims keep their meaning, and P -> P.

    in_labels, out_labels: of the dims, as of labelled_rows.
    """
    count = len(view.op.outputs)
    return (*labelled_rows([in_labels], [out_labels] * count), Signature((P,), (P,) * count))


def transpose(view: OpView) -> OpRows:
    """t, transpose, permute: a dim passes its split to where it goes."""
    ndim, given = len(view.in_shapes[0]), view.given
    order = list(range(ndim))
    if "dims" in given:
        order = [d % ndim for d in given["dims"]]
    elif "dim0" in given and ndim:
        a, b = given["dim0"] % ndim, given["dim1"] % ndim
        order[a], order[b] = b, a
    elif "dim0" not in given:
        order.reverse()
    return move_dims(tuple(range(ndim)), tuple(order), view)


def expand(view: OpView) -> OpRows:
    """expand: a dim of full size passes its split; a new or widened dim can be made split."""
    source, target = view.in_shapes[0], view.made
    shift = len(target) - len(source)
    widened = [d for d, n in enumerate(target) if d < shift or source[d - shift] != n]
    own = tuple(None if shift + d in widened else shift + d for d in range(len(source)))
    return move_dims(own, tuple(range(len(target))), view)


def unsqueeze(view: OpView) -> OpRows:
    """unsqueeze: the new dim has size 1 and no split."""
    ndim = len(view.in_shapes[0])
    at = view.given["dim"] % (ndim + 1)
    return move_dims(tuple(range(ndim)), (*range(at), None, *range(at, ndim)), view)


def _named_dims(view: OpView | LocalView) -> list[int]:
    """Dims that a squeeze names; all where it names none."""
    ndim = len(view.in_shapes[0])
    dim = view.given.get("dim", range(ndim))
    return [d % ndim for d in ((dim,) if isinstance(dim, int) else dim)] if ndim else []


def squeeze(view: OpView) -> OpRows:
    """squeeze: dims of size 1 go, the others pass their split."""
    shape, out, named = view.in_shapes[0], view.out_shapes[0], _named_dims(view)
    kept = tuple(d for d, size in enumerate(shape) if size != 1 or d not in named)
    if out is not None and len(kept) != len(out):
        return (Signature((P,), (P,)),)  # a dim that the axes before have cut to 1 stays
    return move_dims(tuple(range(len(shape))), kept, view)


def local_squeeze(view: LocalView) -> LocalCall:
    """The logical dims are named: of another dim this rank may hold one element."""
    ones = tuple(d for d in _named_dims(view) if view.in_shapes[0][d] == 1)
    return LocalCall(torch.ops.aten.squeeze.dims, (view.op.args[0], ones))


_RESHAPE = OpInfo(regroup, local=local_view, traits=(Trait.RESHAPE, Trait.ALIASES))
_TRANSPOSE = OpInfo(transpose, traits=(Trait.ALIASES,))
_SQUEEZE = OpInfo(squeeze, local=local_squeeze)

OPS: Mapping[str, OpInfo] = {
    **{f"aten.{name}.default": _RESHAPE for name in ("view", "_reshape_alias", "reshape")},
    "aten._unsafe_view.default": replace(_RESHAPE, traits=(*_RESHAPE.traits, Trait.VIEW)),
    **{f"aten.{name}": _TRANSPOSE for name in ("t.default", "transpose.int", "permute.default")},
    "aten.expand.default": OpInfo(expand, local=lambda view: view.rebind(size=view.made_shape)),
    "aten.unsqueeze.default": OpInfo(unsqueeze, traits=(Trait.ALIASES,)),
    **{f"aten.squeeze.{name}": _SQUEEZE for name in ("default", "dim", "dims")},
}
