"""turn_weights: signed -> signed.  Large weights that backward multiplies with, turned once a step.

A gradient of activations is grad @ weight, and oneDNN wants the weight of a product by columns, as
forward's weight.t() is: else it turns the weight itself, with every micro-batch.  Of 8192 x 256
numbers that is 1.5 of 11 ms.  So where a step has several micro-batches a copy is made once, behind
the update (hoist_weights), for the memory of another weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flowrun.engine.graph import BACKWARD, LogicalGraph, Op, Ref, Tensor
from flowrun.engine.sbp import NdSbp, S, Split
from flowrun.engine.strategy import Strategy


def turn_weights(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Products of backward read a copy of weights of at least `turned_bytes` of the hardware.

    Only where ranks read the weight as it is at home: with ZeRO a second copy would be gathered.
    """
    least = strategy.hardware.turned_bytes
    if not least or strategy.micro_batches == 1 or strategy.zero.stage:
        return graph
    homes = {v.tensor: v.nd_sbp for v in graph.variables if v.kind == "parameter"}
    tensors, turned, ops = dict(graph.tensors), set[str](), list[Op]()
    for op in graph.ops:
        weight = _multiplied_with(op)
        large = weight in homes and graph.tensors[weight].num_bytes >= least
        if large and homes[weight] == op.in_sbp[1]:
            if weight not in turned:
                turned.add(weight)
                made = list(_turned(op, weight, homes[weight]))
                ops += made
                tensors.update(_tensors(graph.tensors[weight], made))
            op = replace(op, args=(op.args[0], Ref(_by_columns(weight))))
        ops.append(op)
    return replace(graph, ops=tuple(ops), tensors=tensors) if turned else graph


def _multiplied_with(op: Op) -> str:
    """The second matrix of a product of backward; empty if it is none."""
    if op.target != "aten.mm.default" or op.phase != BACKWARD or len(op.inputs) != 2:
        return ""
    return op.inputs[1]


def _by_columns(weight: str) -> str:
    return f"{weight}/by columns"


def _turned(reader: Op, weight: str, home: NdSbp) -> Iterator[Op]:
    """Its transpose, by rows, and the transpose of that."""
    across = tuple(S(1 - sbp.dim) if isinstance(sbp, Split) else sbp for sbp in home)
    names = (weight, f"{weight}/across", f"{weight}/turned", _by_columns(weight))
    by_rows = (("memory_format", torch.contiguous_format),)
    for k, (target, kwargs, ins, out) in enumerate(
        (
            ("aten.t.default", (), home, across),
            ("aten.clone.default", by_rows, across, across),
            ("aten.t.default", (), across, home),
        )
    ):
        read, made = names[k : k + 2]
        yield replace(
            reader,
            name=made,
            target=target,
            args=(Ref(read),),
            kwargs=kwargs,
            outputs=(made,),
            in_sbp=(ins,),
            out_sbp=(out,),
        )


def _tensors(weight: Tensor, made: list[Op]) -> dict[str, Tensor]:
    """Of these ops."""
    names = [op.makes[0] for op in made]
    shapes = (weight.shape[::-1], weight.shape[::-1], weight.shape)
    return {n: replace(weight, name=n, shape=s) for n, s in zip(names, shapes, strict=True)}
