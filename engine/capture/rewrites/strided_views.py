"""strided_views: reads of memory by strides, in torch's joint graph -> views of elements.

`as_strided` addresses memory, but each rank lays out its piece as it likes.  An as_strided that
reads all elements of its input in their order (as in pooling to one pixel of a channels-last image)
becomes a view.  For any other, as in the frames of a short-time Fourier transform, the input is
permuted into the order of its memory, in which engine/ops/shapes/strided.py counts strides.

Relied upon of torch (tests/engine/capture/rewrites/test_strided_views.py): nodes carry fake tensors
as `meta["val"]`, with the strides that autograd relied on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.torch_internals import OpOverload

READ, WRITE = torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default
VIEW, PERMUTE = torch.ops.aten.view.default, torch.ops.aten.permute.default


def view_elements(graph: torch.fx.Graph) -> None:
    """Rewrite all reads and writes by strides in the graph.

    Raise RecipeError if one reads memory outside of its input, or an input with gaps.
    """
    for node in list(graph.nodes):
        if node.target in (READ, WRITE):
            _rewrite(graph, node)


def _rewrite(graph: torch.fx.Graph, node: Any) -> None:
    whole, *written = node.args[: 1 if node.target == READ else 2]
    size, stride, *start = node.args[1 + len(written) :]
    value = whole.meta["val"]
    first = value.storage_offset()
    offset = start[0] if start and start[0] is not None else first
    if offset == first and walk(size, stride) == walk(value.shape, value.stride()):
        given = (written[0], tuple(value.shape)) if written else (whole, tuple(size))
        _replace(graph, node, VIEW, given)
        return
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    turned = order != sorted(order)
    reach = offset - first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    inside = first <= offset and reach < value.numel()
    if not inside or not _is_gapless(value, order) or (turned and written):
        raise RecipeError(
            "model",
            f"as_strided to {tuple(size)} by strides {tuple(stride)} does not fit the memory of its"
            f" input, of shape {tuple(value.shape)} and strides {tuple(value.stride())}.",
            "Write it as a view of elements: unfold, narrow, permute or reshape.",
        )
    if turned:
        with graph.inserting_before(node):
            turn = graph.call_function(PERMUTE, (whole, order))
        turn.meta = {**node.meta, "val": value.permute(order)}
        whole = turn
    node.args = (whole, *written, size, stride, offset - first)


def _is_gapless(value: torch.Tensor, order: Sequence[int]) -> bool:
    """True if the elements lie one after the other when dims are read in this order."""
    read = walk([value.shape[d] for d in order], [value.stride(d) for d in order])
    return read in ([], [(value.numel(), 1)])


def _replace(
    graph: torch.fx.Graph, node: torch.fx.Node, target: OpOverload, args: tuple[Any, ...]
) -> None:
    with graph.inserting_before(node):
        other = graph.call_function(target, args)
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def walk(size: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """Return the order in which memory is read, as (steps, length of a step), outermost first.

    Dims of one element are left out, and dims that are contiguous with each other are merged, so
    that equal walks from one offset read the same elements in the same order.
    """
    if math.prod(size) == 0:
        return []
    steps: list[tuple[int, int]] = []
    for count, length in zip(size, stride, strict=True):
        if count == 1:
            continue
        if steps and steps[-1][1] == count * length:
            steps[-1] = (steps[-1][0] * count, length)
        else:
            steps.append((count, length))
    return steps
