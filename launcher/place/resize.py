"""resize: a graph captured of two numbers of samples -> the same graph of any other.

Sizes in a captured graph are linear in the samples of a micro-batch, and means divide by them.  One
sample is captured for itself: torch treats a dim of size 1 as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from flowrun.engine.ir.graph import LogicalGraph


def resize(rows: int, known: Mapping[int, LogicalGraph]) -> LogicalGraph | None:
    """Return the graph of `rows` samples; None if it cannot be derived.

    known: number of samples -> graph.
    """
    several = sorted(n for n in known if n > 1)[:2]
    if rows == 1 or len(several) < 2:
        return None
    low, high = several
    try:
        graph: LogicalGraph = _extend(known[low], known[high], low, high, rows)
    except ValueError:
        return None
    return graph


def _extend(one: Any, two: Any, low: int, high: int, rows: int) -> Any:
    """Return of `rows` samples what is `one` of `low`, and `two` of `high`.  Raises ValueError."""
    if one == two:
        return one
    match one, two:
        case tuple(), tuple():
            return tuple(_extend(a, b, low, high, rows) for a, b in zip(one, two, strict=True))
        case dict(), dict() if one.keys() == two.keys():
            return {key: _extend(one[key], two[key], low, high, rows) for key in one}
        case int(), int() if (two - one) * (rows - low) % (high - low) == 0:
            return one + (two - one) * (rows - low) // (high - low)
        case float(), float() if one * low == two * high:
            return one * low / rows
    whole: Any = one  # a type checker takes what is_dataclass has seen for a class, too
    if not is_dataclass(one) or type(one) is not type(two):
        raise ValueError(one, two)
    names = (each.name for each in fields(one) if each.init and each.compare)
    parts = ((name, getattr(one, name), getattr(two, name)) for name in names)
    return replace(whole, **{name: _extend(a, b, low, high, rows) for name, a, b in parts})
