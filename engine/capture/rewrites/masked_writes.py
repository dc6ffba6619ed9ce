"""masked_writes: assignments under a boolean mask, x[mask] = value, as torch.where.

torch uses the op for assignments at positions (aten.index_put), with a mask in the place of
positions.  torch.where is elementwise, so that mask, value and tensor can be split alike.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.signature import bind
from flowrun.engine.ops.shapes.index import PUT_UNDER_MASK

_PUT = "aten.index_put.default"


def choose_under_masks(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph without masks among the positions of an index_put."""
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        if op.target == _PUT and any(i and _is_mask(tensors[i.name]) for i in op.args[1]):
            # each position under the mask may have a value of its own
            ops += _choice(op, tensors) or [replace(op, target=PUT_UNDER_MASK)]
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _is_mask(tensor: LogicalTensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _choice(op: Op, tensors: dict[str, LogicalTensor]) -> list[Op]:
    """Return ops that write an index_put as torch.where; add what they make to `tensors`.

    None if each position has a value of its own, or if there are positions in addition to a mask.
    """
    given = bind(op)
    named = [(at, index) for at, index in enumerate(given["indices"]) if index is not None]
    x, value = (tensors[given[key].name] for key in ("self", "values"))
    if len(named) > 1:
        return []
    ((at, index),) = named
    mask = tensors[index.name]
    trailing = len(x.shape) - at - len(mask.shape)
    shown = value.shape
    if len(shown) > trailing:  # a dim of the value stands for the positions under the mask
        place = len(shown) - trailing - 1
        if shown[place] != 1:
            return []
        shown = (*shown[:place], *(1,) * len(mask.shape), *shown[place + 1 :])
    ops: list[Op] = []

    def add(word: str, target: str, args: tuple[object, ...], like: LogicalTensor) -> str:
        name = f"{op.name}_{word}"
        tensors[name] = replace(like, name=name)
        new = replace(op, name=name, target=target, args=args, kwargs=(), outputs=(name,))
        ops.append(new)
        return name

    def view(word: str, tensor: LogicalTensor, shape: Shape) -> str:
        if shape == tensor.shape:
            return tensor.name
        like = replace(tensor, shape=shape)
        return add(word, "aten.view.default", (Ref(tensor.name), shape), like)

    chosen, new = view("mask", mask, (*mask.shape, *(1,) * trailing)), view("value", value, shown)
    if given["accumulate"]:
        new = add("sum", "aten.add.Tensor", (Ref(x.name), Ref(new)), x)
    args = (Ref(chosen), Ref(new), Ref(x.name))
    return [*ops, replace(op, target="aten.where.self", args=args, kwargs=())]
