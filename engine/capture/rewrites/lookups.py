"""lookups: dense gradients of embedding tables, in torch's graph before autograd.

`nn.Embedding(sparse=True)` requests gradients as sparse tensors, so that the cost of a step does
not depend on the number of rows.  The engine has its own way to that (passes/update/sparse_ops.py),
which starts from dense gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import fx

# a function of torch that looks rows up -> the position of its argument `sparse`
_LOOKUPS: Mapping[object, int] = {
    F.embedding: 6,
    torch.embedding: 4,
    F.embedding_bag: 7,
    torch.embedding_bag: 5,
}


def make_gradients_dense(module: fx.GraphModule) -> None:
    """Let every look-up in the graph request dense gradients."""
    for node in module.graph.nodes:
        place = _LOOKUPS.get(node.target) if node.op == "call_function" else None
        if place is None:
            continue
        if len(node.args) > place:
            node.update_arg(place, False)
        elif "sparse" in node.kwargs:
            node.update_kwarg("sparse", False)
    module.recompile()
