"""interpret: run a captured graph op after op on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flowrun.engine.ir.graph import LogicalGraph, Op, Ref, map_refs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.signature import LocalView
from flowrun.engine.ops.registry import localize
from flowrun.engine.ops.traits import has


def interpret(
    graph: LogicalGraph, variables: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the results of the graph by name; the gradient of the loss is 1.

    graph: a captured graph.  variables: name -> value of each variable.  batch: field -> tensor.
    A tensor is dropped after the op that reads it last.
    """
    values = {v.tensor: variables[v.name].detach() for v in graph.variables}
    for feed in graph.feeds:
        tangent = torch.ones((), dtype=graph.tensors[feed.tensor].dtype)
        values[feed.tensor] = tangent if feed.is_own else batch[feed.field]
    last: dict[str, int] = {}
    for k, op in enumerate(graph.ops):
        last.update(dict.fromkeys((*op.inputs, *op.makes), k))
    kept = {tensor for _, tensor in graph.results}
    with torch.no_grad():
        for k, op in enumerate(graph.ops):
            outputs = _run(op, graph, values)
            values.update(outputs)
            for name in {*op.inputs, *op.makes}:
                if last[name] == k and name not in kept:
                    del values[name]
    return {key: values[tensor] for key, tensor in graph.results}


def _run(op: Op, graph: LogicalGraph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what an op makes, by name."""

    def value(ref: Ref) -> Tensor:
        return values[ref.name]

    if has(op.target, Trait.IDENTITY):
        return {str(op.outputs[0]): values[op.inputs[0]]}
    call = localize(_whole(op, graph))
    args, kwargs = map_refs(call.args, value), {k: map_refs(v, value) for k, v in call.kwargs}
    returned = call.function(*args, **kwargs)
    outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    pairs = zip(op.outputs, outputs, strict=True)
    return {name: tensor for name, tensor in pairs if name is not None}


def _whole(op: Op, graph: LogicalGraph) -> LocalView:
    """Return the op as seen by a rank that holds all of every tensor."""
    read = tuple(graph.tensors[name].shape for name in op.inputs)
    made = tuple(None if name is None else graph.tensors[name].shape for name in op.outputs)
    slices = tuple(tuple((0, n) for n in shape) for shape in read)
    out = tuple(None if shape is None else tuple((0, n) for n in shape) for shape in made)
    return LocalView(op=op, in_shapes=read, out_shapes=made, in_slices=slices, out_slices=out)
