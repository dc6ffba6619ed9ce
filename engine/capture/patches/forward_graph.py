"""forward_graph: what Dynamo's graph of forward reads, and its look-ups.

A look-up gets a dense gradient, with which passes/update/sparse_ops.py begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

# a function of torch that looks rows up -> the position of its argument `sparse`
_LOOKUPS: Mapping[object, int] = {
    F.embedding: 6,
    torch.embedding: 4,
    F.embedding_bag: 7,
    torch.embedding_bag: 5,
}


def with_dense_gradient(
    function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with a dense gradient if it is a look-up."""
    place = _LOOKUPS.get(function)
    if place is not None and len(args) > place:
        args = (*args[:place], False, *args[place + 1 :])
    dense = {"sparse": False} if place is not None and "sparse" in kwargs else {}
    return args, {**kwargs, **dense}


def make_gradients_dense(module: torch.fx.GraphModule) -> None:
    """Let every look-up of a graph request a dense gradient."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = with_dense_gradient(node.target, node.args, node.kwargs)
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
