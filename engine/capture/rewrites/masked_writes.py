"""masked: assignments under a boolean mask, x[mask] = value, as choices between two tensors.

torch writes them as it writes those at positions (aten.index_put), with a mask where positions
would be.  A choice is elementwise: mask, value and tensor divide alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ops.shapes.index import PUT_UNDER_MASK
from flowrun.engine.ops.signature import bind

_PUT = "aten.index_put.default"


def choose_under_masks(graph: LogicalGraph) -> LogicalGraph:
    """No mask is left among the positions of an index_put."""
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        if op.target != _PUT or not _has_mask(op, tensors):
            ops.append(op)
            continue
        put = _choice(op, tensors)
        if put is None:  # as many values as the mask has places
            ops.append(replace(op, target=PUT_UNDER_MASK))
        else:
            tensors.update({tensor.name: tensor for tensor in put.tensors})
            ops.extend(put.ops)
    return replace(graph, ops=tuple(ops), tensors=tensors)


class _MaskedChoice(NamedTuple):
    ops: list[Op]
    tensors: list[LogicalTensor]


def _has_mask(op: Op, tensors: dict[str, LogicalTensor]) -> bool:
    return any(i and tensors[i.name].dtype in (torch.bool, torch.uint8) for i in op.args[1])


def _choice(op: Op, tensors: dict[str, LogicalTensor]) -> _MaskedChoice | None:
    """None where each place has a value of its own, or there are positions beside the mask."""
    given = bind(op)
    named = [(at, index) for at, index in enumerate(given["indices"]) if index is not None]
    x, value = (tensors[given[key].name] for key in ("self", "values"))
    if len(named) > 1:
        return None
    ((at, index),) = named
    mask = tensors[index.name]
    behind = len(x.shape) - at - len(mask.shape)
    ones = (1,) * len(mask.shape)
    shown = value.shape
    if len(shown) > behind:  # a dim of the value stands for the places
        place = len(shown) - behind - 1
        if shown[place] != 1:
            return None
        shown = (*shown[:place], *ones, *shown[place + 1 :])
    made = _MaskedChoice([], [])
    chosen = _viewed(op, made, mask, (*mask.shape, *(1,) * behind), "mask")
    new = _viewed(op, made, value, shown, "value")
    if given["accumulate"]:
        made.tensors.append(replace(x, name=f"{op.name}_sum"))
        new = _add(op, made, "sum", "aten.add.Tensor", (Ref(x.name), Ref(new)))
    args = (Ref(chosen), Ref(new), Ref(x.name))
    made.ops.append(replace(op, target="aten.where.self", args=args, kwargs=()))
    return made


def _viewed(
    op: Op, made: _MaskedChoice, tensor: LogicalTensor, shape: tuple[int, ...], word: str
) -> str:
    if shape == tensor.shape:
        return tensor.name
    made.tensors.append(LogicalTensor(f"{op.name}_{word}", shape, tensor.dtype))
    return _add(op, made, word, "aten.view.default", (Ref(tensor.name), shape))


def _add(op: Op, made: _MaskedChoice, word: str, target: str, args: tuple[object, ...]) -> str:
    name = f"{op.name}_{word}"
    made.ops.append(replace(op, name=name, target=target, args=args, kwargs=(), outputs=(name,)))
    return name
