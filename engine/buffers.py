"""buffers: what forward writes into the model's buffers, as ops of the captured graph.

A plain loop with gradient accumulation changes a running statistic with every micro-batch, one
after the other, and so does this: flow.assign writes the new value in place, and everyone else
reads a copy of the value before (flow.snapshot).  The registers then keep the micro-batches in
order.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.graph import FORWARD, LogicalGraph, Op, Ref, Variable, rename_inputs

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
    before = {variables[name].tensor: f"{name}/before" for name in changed}
    copies: list[Op] = []
    assigns: dict[str | None, list[Op]] = {}  # tensor -> ops behind the one that makes it
    for name, made in changed.items():
        old = variables[name]
        module = _module(graph, old)
        copy, new = before[old.tensor], f"{name}'"
        tensors |= {n: replace(tensors[old.tensor], name=n) for n in (copy, new)}
        read = (Ref(old.tensor),)
        copies.append(Op(copy, "flow.snapshot", read, (), (copy,), module, FORWARD))
        args = (read, (Ref(before.get(made, made)),))
        write = Op(new, "flow.assign", args, (), (new,), module, FORWARD)
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


def _module(graph: LogicalGraph, buffer: Variable) -> str:
    """The module that owns the buffer, if it computes; else the one that reads it first."""
    owner = buffer.name.rpartition(".")[0]
    if any(op.module == owner for op in graph.ops):
        return owner
    return next((op.module for op in graph.consumers.get(buffer.tensor, ())), owner)
