"""buffers: what forward writes into the model's buffers, as ops of the captured graph.

A plain loop with gradient accumulation changes a running statistic with every micro-batch, one
after the other, and so does this: flow.assign writes the new value in place, and everyone else
reads a copy of the value before (flow.snapshot).  The registers then keep the micro-batches in
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import (
    FORWARD,
    LogicalGraph,
    LogicalTensor,
    Op,
    Ref,
    Variable,
    rename_inputs,
)
from flowrun.engine.ir.names import tensor_of_variable
from flowrun.engine.ops.flow.update import ASSIGN, SNAPSHOT

WRITES = "writes/"  # a result of this name is no report, but what forward makes of a buffer


def assign_buffers(graph: LogicalGraph) -> LogicalGraph:
    """No result of the graph is what a buffer becomes; ops write that."""
    changed = {
        key.removeprefix(WRITES): name for key, name in graph.results if key.startswith(WRITES)
    }
    if not changed:
        return graph
    tensors = dict(graph.tensors)
    variables = {v.name: v for v in graph.variables}
    before = {variables[name].tensor: f"{variables[name].tensor}/before" for name in changed}
    copies: list[Op] = []
    assigns: dict[str | None, list[Op]] = {}  # tensor -> ops behind the one that makes it
    for name, made in changed.items():
        old = variables[name]
        module = _module(graph, old)
        copy, new = before[old.tensor], f"{old.tensor}'"
        tensors |= {n: replace(tensors[old.tensor], name=n) for n in (copy, new)}
        read = (Ref(old.tensor),)
        copies.append(Op(copy, SNAPSHOT, read, (), outputs=(copy,), module=module, phase=FORWARD))
        args = (read, (Ref(before.get(made, made)),))
        write = Op(new, ASSIGN, args, (), outputs=(new,), module=module, phase=FORWARD)
        assigns.setdefault(made if made in graph.producer else None, []).append(write)
        variables[name] = replace(old, new=new)
    ops = [*copies, *assigns.get(None, ())]
    for op in graph.ops:
        ops.append(rename_inputs(op, before))
        ops.extend(write for name in op.makes for write in assigns.get(name, ()))
    return replace(
        graph,
        ops=tuple(ops),
        tensors=tensors,
        variables=tuple(variables.values()),
        results=tuple((key, name) for key, name in graph.results if not key.startswith(WRITES)),
    )


def with_buffers(graph: LogicalGraph, assigned: Mapping[str, torch.Tensor]) -> LogicalGraph:
    """The graph with a variable for each buffer that forward assigns (self.running = …), whether or
    not it reads it, and without writes that leave a buffer as it is.

    Raises RecipeError if what is assigned is no buffer of the same shape and dtype.
    """
    if not assigned:
        return graph
    variables = {v.name: v for v in graph.variables}
    tensors = dict(graph.tensors)
    writes: dict[str, str] = {}
    for key, made in graph.results:
        name = key.removeprefix(WRITES)
        if key == name or not _is_copy(graph, made, variables.get(name)):
            writes.setdefault(key, made)
    for name, old in assigned.items():
        now = tensors.get(writes.get(f"{WRITES}{name}", ""))
        if now is not None and (now.shape, now.dtype) != (tuple(old.shape), old.dtype):
            raise RecipeError(
                "model",
                f"forward assigns the buffer {name}, {old.dtype} of shape {tuple(old.shape)}, a"
                f" tensor that is {now.dtype} of shape {now.shape}.",
                "Keep a buffer of one shape and dtype, and write its part: self.x[:n].copy_(…).",
            )
        if now is not None and name not in variables:
            tensor = tensor_of_variable(name)
            tensors[tensor] = LogicalTensor(tensor, now.shape, now.dtype)
            variables[name] = Variable(name, tensor, "buffer")
    return replace(
        graph,
        tensors=tensors,
        variables=tuple(variables.values()),
        results=tuple(writes.items()),
    )


def _is_copy(graph: LogicalGraph, made: str, buffer: Variable | None) -> bool:
    """True if a tensor is a copy of a buffer, or it."""
    op = graph.producer.get(made)
    while op is not None and op.target == "aten.clone.default":
        made = op.inputs[0]
        op = graph.producer.get(made)
    return buffer is not None and made == buffer.tensor


def _module(graph: LogicalGraph, buffer: Variable) -> str:
    """The module that owns the buffer, if it computes; else the one that reads it first."""
    owner = buffer.name.rpartition(".")[0]
    if any(op.module == owner for op in graph.ops):
        return owner
    return next((op.module for op in graph.consumers.get(buffer.tensor, ())), owner)
