"""give_experts_room: captured -> captured.  Experts get slots for tokens that travel to their ranks
(ops/experts/routed.py), where `engine.expert_room` asks for them.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ops.experts.routed import KEY, ROOM, travels
from flowrun.engine.strategy import Strategy


def give_experts_room(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Return the graph with rows by which tokens travel.  Raises RecipeError if no token may."""
    room = strategy.expert_room
    if not room:
        return graph
    if not any(travels(op) for op in graph.ops):
        instead = "Leave the key out, or write model.room=null for a model of flowrun's."
        raise RecipeError(KEY, "the model has no experts without capacity.", instead)
    ops = (replace(op, kwargs=((ROOM, room),)) if travels(op) else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))
