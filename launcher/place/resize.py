"""resize: a graph captured of two numbers of samples -> the same graph of any other.

Sizes in a captured graph are linear in the samples of a micro-batch, and means divide by them.  One
sample is captured for itself: torch treats a dim of size 1 as none.  What a search finds best is
captured as it is, whatever was derived here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowrun.engine.ir.graph import LogicalGraph, Op


class OtherGraphError(Exception):
    """Two graphs differ by more than their samples."""


def resize(rows: int, captured: Mapping[int, LogicalGraph]) -> LogicalGraph | None:
    """Return the graph of `rows` samples, of two of those that were captured; None if it cannot be
    derived.

    captured: number of samples -> graph.
    """
    known = sorted(n for n in captured if n > 1)[:2]
    if rows == 1 or len(known) < 2:
        return None
    one, two = (captured[n] for n in known)
    line = _Line(known[0], known[1], rows)
    try:
        return line.graph(one, two)
    except OtherGraphError:
        return None


class _Line:
    """The line through the values at `low` and at `high` samples, at `rows` of them."""

    def __init__(self, low: int, high: int, rows: int) -> None:
        self.low, self.high, self.rows = low, high, rows

    def graph(self, one: LogicalGraph, two: LogicalGraph) -> LogicalGraph:
        if len(one.ops) != len(two.ops) or one.tensors.keys() != two.tensors.keys():
            raise OtherGraphError
        tensors = {
            name: replace(tensor, shape=self.value(tensor.shape, two.tensors[name].shape))
            for name, tensor in one.tensors.items()
        }
        ops = tuple(self.op(a, b) for a, b in zip(one.ops, two.ops, strict=True))
        return replace(one, ops=ops, tensors=tensors)

    def op(self, one: Op, two: Op) -> Op:
        if one == two:
            return one
        args, kwargs = self.value((one.args, one.kwargs), (two.args, two.kwargs))
        if replace(two, args=one.args, kwargs=one.kwargs) != one:
            raise OtherGraphError
        return replace(one, args=args, kwargs=kwargs)

    def value(self, one: Any, two: Any) -> Any:
        """Return a constant, or nested tuples of them."""
        if one == two:
            return one
        if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
            return tuple(map(self.value, one, two))
        if {type(one), type(two)} == {int}:
            more, odd = divmod((two - one) * (self.rows - self.low), self.high - self.low)
            if not odd:
                return one + more
        if {type(one), type(two)} == {float} and one * self.low == two * self.high:
            return one * self.low / self.rows
        raise OtherGraphError
