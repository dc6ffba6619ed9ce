"""Seconds of the ops of a graph: whole, or of one that is laid out on the rank with the largest
shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.boxing.boxing import path_seconds
from flowrun.engine.cost.op_cost import op_seconds
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import UPDATE, LogicalGraph, Op
from flowrun.engine.ir.placement import Placement, Shape, largest_shape


def whole_seconds(op: Op, graph: LogicalGraph, hardware: Hardware) -> float:
    """Of one op on logical shapes: as if on one rank."""
    ins = [graph.tensors[name].shape for name in op.inputs]
    outs = [None if name is None else graph.tensors[name].shape for name in op.outputs]
    return op_seconds(op, ins, outs, graph.tensors, hardware)


def local_seconds(op: Op, graph: LogicalGraph, grid: tuple[int, ...], hardware: Hardware) -> float:
    """Of one op that has a signature.  grid: sizes of its stage's axes."""
    ins, outs = local_shapes(op, graph, grid)
    return op_seconds(op, ins, outs, graph.tensors, hardware)


def local_shapes(
    op: Op, graph: LogicalGraph, grid: tuple[int, ...]
) -> tuple[list[Shape], list[Shape | None]]:
    """Inputs and outputs of an op that has a signature, on the rank with the largest shards."""
    shape = graph.tensors
    ins = [
        largest_shape(shape[n].shape, nd, grid) for n, nd in zip(op.inputs, op.in_sbp, strict=True)
    ]
    outs = [
        None if n is None else largest_shape(shape[n].shape, nd, grid)
        for n, nd in zip(op.outputs, op.out_sbp, strict=True)
    ]
    return ins, outs


def boxing_seconds(
    graph: LogicalGraph, placements: Sequence[Placement], hardware: Hardware
) -> Iterator[tuple[Op, float]]:
    """(the op that makes a tensor, seconds) of every boxing inside a stage that a micro-batch asks
    for, nothing of it fused.  graph: signed, but for its update.
    """
    links = [hardware.links(placement) for placement in placements]
    wanted = {
        (name, nd_sbp, op.stage): None
        for op in graph.ops
        if op.phase != UPDATE
        for name, nd_sbp in zip(op.inputs, op.in_sbp, strict=True)
    }
    for name, nd_sbp, stage in wanted:
        maker = graph.producer.get(name)
        if maker is not None and maker.stage == stage:
            tensor, have = graph.tensors[name], maker.out_sbp[maker.outputs.index(name)]
            grid, num_bytes = placements[stage].shape, tensor.num_bytes
            yield maker, path_seconds(have, nd_sbp, grid, tensor.shape, num_bytes, links[stage])


def repeated_seconds(plan: Plan, stage: int, hardware: Hardware) -> float:
    """Of what recomputation runs again on a rank of a stage, in a step."""
    grid = plan.placements[stage].shape
    total = 0.0
    for actor in plan.stage_actors(stage):
        if isinstance(actor.work, RegionWork):
            again = [op for op in actor.work.ops if op.name.endswith("/again")]
            acts = plan.acts_per_step(actor)
            total += acts * sum(local_seconds(op, plan.graph, grid, hardware) for op in again)
    return total
