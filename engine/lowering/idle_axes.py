"""Axes of a plan whose ranks all do the same: nothing of the model is divided along them.

Layouts are chosen by the least boxing, so that an axis which no pin asks to divide stays whole:
right numbers, and ranks that gain nothing.  The plan is read after all passes, so that ZeRO, whose
shards are homes of weights, divides too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.sbp import Broadcast, NdSbp
from flowrun.engine.ops.traits import is_engine_op

LEAST_SHARE = 0.01  # of a stage's weights or activations: below it an axis divides nothing


@dataclass(frozen=True, slots=True)
class IdleAxis:
    """An axis along which the ranks of some stages do the same work.

    ranks: along the axis.  stages: where it is so; others: stages where it divides something.
    """

    name: str
    ranks: int
    stages: tuple[int, ...]
    others: tuple[int, ...]


def idle_axes(plan: Plan) -> Iterator[IdleAxis]:
    """Yield the idle axes of a plan of the consistent view, outermost first."""
    for axis, name in enumerate(plan.axes):
        used = [k for k, grid in enumerate(plan.placements) if grid.shape[axis] > 1]
        idle = tuple(k for k in used if _share(plan.graph, axis, k) < LEAST_SHARE)
        if idle:
            ranks = plan.placements[idle[0]].shape[axis]
            yield IdleAxis(name, ranks, idle, tuple(k for k in used if k not in idle))


def _share(graph: LogicalGraph, axis: int, stage: int) -> float:
    """Elements that are split or partial along the axis: the larger share, of what lasts (weights,
    state) and of what ops make.
    """
    lasting = [(v.tensor, v.nd_sbp) for v in graph.variables if v.stage == stage]
    computed = [
        (name, nd_sbp)
        for op in graph.ops
        if op.stage == stage and not is_engine_op(op.target)
        for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=True)
        if name is not None
    ]
    return max(_split_share(graph, lasting, axis), _split_share(graph, computed, axis))


def _split_share(graph: LogicalGraph, tensors: list[tuple[str, NdSbp]], axis: int) -> float:
    sizes = [(graph.tensors[name].num_elements, nd_sbp[axis]) for name, nd_sbp in tensors]
    divided = sum(size for size, sbp in sizes if not isinstance(sbp, Broadcast))
    return divided / max(1, sum(size for size, _ in sizes))
