"""strided: reads of memory by strides, in torch's joint graph -> views of elements.

`as_strided` says where in memory a tensor lies, which is nothing that ranks share: each holds its
piece wherever it likes.  Where it reads the elements that are there in the order that they have
(pooling to one pixel of a channels-last image), it is a view.  Elsewhere, as in the frames of a
short-time Fourier transform, its input is turned into the order of its memory, and
engine/ops/shapes/strided.py counts strides from there.

Relied upon of torch (tests/engine/capture/rewrites/test_strided_views.py): nodes carry fake tensors
as `meta["val"]`, with the strides that autograd counted on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flowrun.engine.errors import RecipeError

READ, WRITE = torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default
VIEW, PERMUTE = torch.ops.aten.view.default, torch.ops.aten.permute.default


def view_elements(graph: torch.fx.Graph) -> None:
    """Rewrite all reads and writes by strides.

    Raises RecipeError if one reads memory that is none of its input's.
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
    reach = offset - first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    gapless = walk([value.shape[d] for d in order], [value.stride(d) for d in order])
    turned = order != sorted(order)
    if (
        gapless not in ([], [(value.numel(), 1)])
        or not first <= offset
        or reach >= value.numel()
        or (turned and written)
    ):
        raise RecipeError(
            "model",
            f"as_strided to {tuple(size)} by {tuple(stride)} reads memory in which a tensor of "
            f"{tuple(value.shape)} does not lie in order.",
            "Write it as a view of elements: unfold, narrow, permute or reshape.",
        )
    if turned:
        with graph.inserting_before(node):
            turn = graph.call_function(PERMUTE, (whole, order))
        turn.meta = {**node.meta, "val": value.permute(order)}
        whole = turn
    node.args = (whole, *written, size, stride, offset - first)


def _replace(graph: torch.fx.Graph, node: Any, target: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        other = graph.call_function(target, args)
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def walk(size: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """The way that memory is walked in, as (steps, length of a step), outermost first.

    Dims of one element are no steps, and neighbours that are walked in one go are one: equal walks
    from one place meet the same elements in the same order.
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
