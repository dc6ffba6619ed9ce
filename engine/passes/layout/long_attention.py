"""Attention on an axis that divides lengths: each rank has some heads of all tokens, or its own
queries and all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ir.sbp import S
from flowrun.engine.ir.signature import Signature, bind, places
from flowrun.engine.ops.nn import attention
from flowrun.engine.ops.traits import is_view
from flowrun.engine.strategy import GATHER, HEADS


def rows_of_attention(op: Op, legal: Sequence[Signature], how: str) -> Sequence[Signature]:
    """Return the rows of an op for an axis that divides lengths, by `engine.long_attention`.

    how: HEADS: each rank has some heads of all tokens; GATHER: its own queries, all keys; else all.
    Of what is not attention, all.  Raises RecipeError where there is none.
    """
    if op.target not in attention.OPS or how not in (HEADS, GATHER):
        return legal
    at, wanted = places(op).index("query"), S(1 if how == HEADS else 2)
    if chosen := [row for row in legal if row.inputs[at] == wanted]:
        return chosen
    why = "it has fewer heads than ranks" if how == HEADS else "it sees documents"
    if bind(op).get("dropout_p"):
        why = "it drops weights"
    raise RecipeError(
        "engine.long_attention",
        f"{op.module}: attention cannot be laid out by {how}: {why}.",
        "Write engine.long_attention=auto.",
    )


def keys_of_attention(graph: LogicalGraph) -> frozenset[str]:
    """Return the tensors that attention reads as keys and values, and those that they show."""
    found: set[str] = set()
    for op in graph.ops:
        named = zip(places(op), op.inputs, strict=True) if op.target in attention.OPS else ()
        for name in (name for place, name in named if place in ("key", "value")):
            found.add(name)
            while (maker := graph.producer.get(name)) and len(maker.outputs) == 1:
                if not is_view(maker.target):
                    break
                (name,) = maker.inputs
                found.add(name)
    return frozenset(found)
