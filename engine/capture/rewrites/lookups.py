"""lookups: torch's graph of a module, before autograd sees it -> the same, with dense gradients of
its embedding tables.

`nn.Embedding(sparse=True)` asks torch for gradients as sparse tensors, so that a step costs the
same for any number of rows.  The engine does that itself, by the graph (update/sparse_ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

# a function of torch that looks rows up -> the place of its argument `sparse`
_LOOKUPS: Mapping[Callable[..., Any], int] = {
    F.embedding: 6,
    torch.embedding: 4,
    F.embedding_bag: 7,
    torch.embedding_bag: 5,
}


def make_gradients_dense(module: fx.GraphModule) -> None:
    """Look-ups that ask for sparse gradients ask for dense ones."""
    for node in module.graph.nodes:
        place = _LOOKUPS.get(node.target) if node.op == "call_function" else None
        if place is None:
            continue
        if len(node.args) > place:
            node.update_arg(place, False)
        elif "sparse" in node.kwargs:
            node.update_kwarg("sparse", False)
    module.recompile()
