"""masked_writes: assignments under a boolean mask, x[mask] = value, as torch.where.

torch uses the op for assignments at positions (aten.index_put), with a mask in the place of
positions.  torch.where is elementwise, so that mask, value and tensor can be split alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ir.signature import bind
from flowrun.engine.ops.shapes.index import PUT_UNDER_MASK

_PUT = "aten.index_put.default"


def choose_under_masks(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph without masks among the positions of an index_put."""
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        if op.target != _PUT or not _has_mask(op, tensors):
            ops.append(op)
            continue
        put = _choice(op, tensors)
        if put is None:  # each position under the mask has a value of its own
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
    """Return ops that write an index_put as torch.where.

    None if each position has a value of its own, or if there are positions in addition to a mask.
    """
    given = bind(op)
    named = [(at, index) for at, index in enumerate(given["indices"]) if index is not None]
    x, value = (tensors[given[key].name] for key in ("self", "values"))
    if len(named) > 1:
        return None
    ((at, index),) = named
    mask = tensors[index.name]
    trailing = len(x.shape) - at - len(mask.shape)
    ones = (1,) * len(mask.shape)
    shown = value.shape
    if len(shown) > trailing:  # a dim of the value stands for the positions under the mask
        place = len(shown) - trailing - 1
        if shown[place] != 1:
            return None
        shown = (*shown[:place], *ones, *shown[place + 1 :])
    choice = _MaskedChoice([], [])
    chosen = _add_view(op, choice, mask, (*mask.shape, *(1,) * trailing), "mask")
    new = _add_view(op, choice, value, shown, "value")
    if given["accumulate"]:
        choice.tensors.append(replace(x, name=f"{op.name}_sum"))
        new = _add(op, choice, "sum", "aten.add.Tensor", (Ref(x.name), Ref(new)))
    args = (Ref(chosen), Ref(new), Ref(x.name))
    choice.ops.append(replace(op, target="aten.where.self", args=args, kwargs=()))
    return choice


def _add_view(
    op: Op, choice: _MaskedChoice, tensor: LogicalTensor, shape: tuple[int, ...], word: str
) -> str:
    if shape == tensor.shape:
        return tensor.name
    choice.tensors.append(LogicalTensor(f"{op.name}_{word}", shape, tensor.dtype))
    return _add(op, choice, word, "aten.view.default", (Ref(tensor.name), shape))


def _add(op: Op, choice: _MaskedChoice, word: str, target: str, args: tuple[object, ...]) -> str:
    name = f"{op.name}_{word}"
    choice.ops.append(replace(op, name=name, target=target, args=args, kwargs=(), outputs=(name,)))
    return name
