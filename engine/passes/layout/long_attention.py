"""Attention on an axis that divides lengths: each rank has some heads of all tokens, or its own
queries and all keys and values, which are gathered or come around.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from flowrun.engine.boxing.boxing import BoxingStep, start_seconds, step_seconds
from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.graph import BACKWARD, LogicalGraph, LogicalTensor, Op
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.ir.signature import Signature, bind, places
from flowrun.engine.ops.nn import attention
from flowrun.engine.ops.traits import is_view
from flowrun.engine.strategy import BALANCED, GATHER, HEADS, RING, Strategy

LONG_ATTENTION = "engine.long_attention"  # the key
_WHY_NOT = {
    HEADS: "it has fewer heads than ranks",
    GATHER: "its mask is causal, and it has not as many queries as keys",
    RING: "it has a mask, or its ranks do not divide the length",
}
_WANTED = {HEADS: (S(1), S(1)), GATHER: (S(2), B), RING: (S(2), S(2))}  # of queries and keys
_WANTED |= {balanced: _WANTED[way] for balanced, way in BALANCED.items()}


def open_ways(graph: LogicalGraph, strategy: Strategy) -> tuple[str, ...]:
    """Return the ways of attention that a strategy leaves open for a graph: none, or all that
    differ.
    """
    causal = [attention.is_causal(op) for op in graph.ops if op.target in attention.OPS]
    is_open = strategy.long_attention not in _WANTED
    if not (strategy.divides_lengths and causal and is_open):
        return ()
    return tuple(way for way in _WANTED if way not in BALANCED or any(causal))


def rows_of_attention(
    op: Op, legal: Sequence[Signature], how: str, in_shapes: Sequence[Shape], parts: int
) -> Sequence[Signature]:
    """Return the rows of an op for an axis that divides lengths, by `engine.long_attention`.

    how: HEADS: each rank has some heads of all tokens; GATHER: its own queries, all keys; RING: its
    own queries, while keys come around; one of BALANCED: the same rows; else all.  Of what is not
    attention, all.  in_shapes, parts: what the axes before left of the inputs, and ranks of this
    axis.  Raises RecipeError where there is none.
    """
    if op.target not in attention.OPS or how not in _WANTED:
        return legal
    ends = [places(op).index(name) for name in ("query", "key")]
    chosen = [row for row in legal if tuple(row.inputs[k] for k in ends) == _WANTED[how]]
    halved = how in BALANCED and attention.is_causal(op)
    if chosen and not (halved and in_shapes[0][2] % (2 * parts)):
        return chosen
    why = _WHY_NOT[BALANCED.get(how, how)]
    if chosen:
        why = "halves of its ranks do not divide the length"
    if bind(op).get("dropout_p"):
        why = "it drops weights"
    raise RecipeError(
        LONG_ATTENTION,
        f"{op.module}: attention cannot be laid out by {how}: {why}.",
        "Write engine.long_attention=auto.",
    )


def ring_seconds(
    op: Op,
    row: Signature,
    in_shapes: Sequence[Shape],
    tensors: Mapping[str, LogicalTensor],
    parts: int,
    link: Link,
) -> float:
    """Return the seconds in which the turned inputs of a row go around `parts` ranks, and backward
    their gradients, which come home with one step more.

    in_shapes: of the op's inputs, with what the ranks hold together.  tensors: by name.
    """
    total, back = 0.0, op.phase == BACKWARD
    for k in row.turned if parts > 1 else ():
        step, sbp, name = BoxingStep(0, row.inputs[k], row.inputs[k]), row.inputs[k], op.inputs[k]
        num_bytes = tensors[name].dtype.itemsize * math.prod(in_shapes[k])
        once = step_seconds(step, (sbp,), (parts,), in_shapes[k], num_bytes, link)
        steps = parts - 1 + parts * back
        total += steps * (once + start_seconds(step, link) / len(row.turned))
    return total


def documents_of_attention(graph: LogicalGraph) -> frozenset[str]:
    """Return the tensors that attention reads as lengths of documents."""
    return frozenset(_read_as(graph, "documents"))


def _read_as(graph: LogicalGraph, *arguments: str) -> Iterator[str]:
    for op in graph.ops:
        named = zip(places(op), op.inputs, strict=True) if op.target in attention.OPS else ()
        yield from (name for place, name in named if place in arguments)


def keys_of_attention(graph: LogicalGraph) -> frozenset[str]:
    """Return the tensors that attention reads as keys and values, and those that they show."""
    found: set[str] = set()
    for name in _read_as(graph, "key", "value"):
        found.add(name)
        while (maker := graph.producer.get(name)) and len(maker.outputs) == 1:
            if not is_view(maker.target):
                break
            (name,) = maker.inputs
            found.add(name)
    return frozenset(found)
