"""forward_graph: what Dynamo's graph of forward reads, and what it calls.

A look-up gets a dense gradient, with which passes/update/sparse_ops.py begins.  A recurrent layer
is one op (recurrent_layers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F

from flowrun.engine.capture.patches.recurrent_layers import OVER_SEQUENCES, run_layers
from flowrun.engine.ir.signature import Function

# a function of torch that looks rows up -> the position of its argument `sparse`
_LOOKUPS: Mapping[object, int] = {
    F.embedding: 6,
    torch.embedding: 4,
    F.embedding_bag: 7,
    torch.embedding_bag: 5,
}


def as_captured(
    function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Function, tuple[Any, ...], dict[str, Any]]:
    """Return the call that is captured in the place of one: function, args, kwargs."""
    function = cast(Function, function)
    if kind := OVER_SEQUENCES.get(function):
        return run_layers, (kind, *args), dict(kwargs)
    place = _LOOKUPS.get(function)
    if place is not None and len(args) > place:
        args = (*args[:place], False, *args[place + 1 :])
    dense = {"sparse": False} if place is not None and "sparse" in kwargs else {}
    return function, args, {**kwargs, **dense}


def replace_calls(module: torch.fx.GraphModule) -> None:
    """Let a graph call what is captured."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target, node.args, node.kwargs = as_captured(node.target, node.args, node.kwargs)
    module.recompile()


def sort_inputs(
    graph: torch.fx.Graph, values: tuple[torch.Tensor, ...], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[torch.fx.Node, str], tuple[torch.Tensor, ...]]:
    """Sort what the placeholders of torch's graph stand for.

    values: the batch.  tensors: parameters and buffers by first name.  Return (placeholder -> name
    of its parameter or buffer, tensors that are neither those nor of the batch).
    """
    named = {id(tensor): name for name, tensor in tensors.items()}
    known = named.keys() | {id(value) for value in values}
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    inputs: Any = graph.process_inputs(*values)  # type: ignore[operator]
    pairs = list(zip(nodes, inputs, strict=True))
    return (
        {node: named[id(value)] for node, value in pairs if id(value) in named},
        tuple(v for _, v in pairs if id(v) not in known and isinstance(v, torch.Tensor)),
    )
