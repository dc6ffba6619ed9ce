"""resize: a graph captured of two numbers of samples -> the same graph of any other.

Sizes in a captured graph are linear in the samples of a micro-batch, and means divide by them.  One
sample is captured for itself: torch treats a dim of size 1 as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowrun.engine.ir.graph import LogicalGraph

Constants = Any  # constants and nested tuples of them


def resize(rows: int, captured: Mapping[int, LogicalGraph]) -> LogicalGraph | None:
    """Return the graph of `rows` samples; None if it cannot be derived.

    captured: number of samples -> graph.
    """
    known = sorted(n for n in captured if n > 1)[:2]
    if rows == 1 or len(known) < 2:
        return None
    one, two = (captured[n] for n in known)
    try:
        numbers = _extend(_numbers(one), _numbers(two), known[0], known[1], rows)
    except ValueError:
        return None
    return _with(one, numbers) if _with(two, _numbers(one)) == one else None


def _numbers(graph: LogicalGraph) -> Constants:
    """Return the constants of all ops and the shapes of all tensors."""
    constants = ((op.args, op.kwargs) for op in graph.ops)
    return tuple(constants), tuple(tensor.shape for tensor in graph.tensors.values())


def _with(graph: LogicalGraph, numbers: Constants) -> LogicalGraph:
    ops = zip(graph.ops, numbers[0], strict=True)
    tensors = zip(graph.tensors.items(), numbers[1], strict=True)
    return replace(
        graph,
        ops=tuple(replace(op, args=args, kwargs=kwargs) for op, (args, kwargs) in ops),
        tensors={name: replace(tensor, shape=shape) for (name, tensor), shape in tensors},
    )


def _extend(one: Constants, two: Constants, low: int, high: int, rows: int) -> Constants:
    """Return what constants, or nested tuples of them, of `low` and of `high` samples are of
    `rows`.  Raises ValueError.
    """
    if one == two:
        return one
    if isinstance(one, tuple) and isinstance(two, tuple):
        pairs = zip(one, two, strict=True)
        return tuple(_extend(a, b, low, high, rows) for a, b in pairs)
    if type(one) is type(two) is int:
        more, odd = divmod((two - one) * (rows - low), high - low)
        if not odd:
            return one + more
    if type(one) is type(two) is float and one * low == two * high:
        return one * low / rows
    raise ValueError(one, two)
