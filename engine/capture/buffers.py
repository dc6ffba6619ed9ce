"""buffers: writes of forward into the model's buffers, as ops of the captured graph.

As in a plain loop with gradient accumulation, a running statistic changes with every micro-batch:
flow.assign writes the new value in place, and all readers read a copy of the value before it
(flow.snapshot).  The registers between these ops keep the micro-batches in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref, Variable, rename_inputs
from flowrun.engine.ir.names import tensor_of_variable
from flowrun.engine.ops.flow.update import ASSIGN, SNAPSHOT

WRITES = "writes/"  # prefix of a result that is the new value of a buffer, by the buffer's name


def assign_buffers(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph with ops that write buffers in the place of results named WRITES."""
    changed = {
        key.removeprefix(WRITES): name for key, name in graph.results if key.startswith(WRITES)
    }
    if not changed:
        return graph
    tensors = dict(graph.tensors)
    variables = {v.name: v for v in graph.variables}
    before = {variables[name].tensor: f"{variables[name].tensor}/before" for name in changed}
    copies: list[Op] = []
    assigns: dict[str | None, list[Op]] = {}  # tensor -> ops that follow its producer
    for name, written in changed.items():
        old = variables[name]
        module = _module(graph, old)
        copy, new = before[old.tensor], f"{old.tensor}'"
        tensors |= {n: replace(tensors[old.tensor], name=n) for n in (copy, new)}
        read = (Ref(old.tensor),)
        copies.append(Op(copy, SNAPSHOT, read, outputs=(copy,), module=module))
        args = (read, (Ref(before.get(written, written)),))
        write = Op(new, ASSIGN, args, outputs=(new,), module=module)
        assigns.setdefault(written if written in graph.producer else None, []).append(write)
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
    """Return the graph with a variable for each buffer that forward assigns (self.running = …).

    assigned: name -> the buffer; forward need not read it.  Writes that leave a buffer unchanged
    are dropped.  Raise RecipeError if forward assigns a tensor of another shape or dtype.
    """
    if not assigned:
        return graph
    variables = {v.name: v for v in graph.variables}
    tensors = dict(graph.tensors)
    writes: dict[str, str] = {}
    for key, result in graph.results:
        name = key.removeprefix(WRITES)
        if key == name or not _is_copy(graph, result, variables.get(name)):
            writes.setdefault(key, result)
    for name, old in assigned.items():
        now = tensors.get(writes.get(f"{WRITES}{name}", ""))
        if now is not None and (now.shape, now.dtype) != (tuple(old.shape), old.dtype):
            raise RecipeError(
                "model",
                f"forward assigns a tensor of {now.dtype} and shape {now.shape} to the buffer"
                f" {name}, which is {old.dtype} of shape {tuple(old.shape)}.",
                "Keep the buffer's shape and dtype, and write a part of it: self.x[:n].copy_(…).",
            )
        if now is not None and name not in variables:
            tensor = tensor_of_variable(name)
            tensors[tensor] = LogicalTensor(tensor, now.shape, now.dtype)
            variables[name] = Variable(name, tensor, "buffer")
    return replace(
        graph, tensors=tensors, variables=tuple(variables.values()), results=tuple(writes.items())
    )


def _is_copy(graph: LogicalGraph, tensor: str, buffer: Variable | None) -> bool:
    """Return whether a tensor is the buffer or a copy of it."""
    op = graph.producer.get(tensor)
    while op is not None and op.target == "aten.clone.default":
        tensor = op.inputs[0]
        op = graph.producer.get(tensor)
    return buffer is not None and tensor == buffer.tensor


def _module(graph: LogicalGraph, buffer: Variable) -> str:
    """Return the module that owns the buffer if it has ops, else the first that reads it."""
    owner = buffer.name.rpartition(".")[0]
    if any(op.module == owner for op in graph.ops):
        return owner
    return next((op.module for op in graph.consumers.get(buffer.tensor, ())), owner)
