"""Seconds of the ops of a graph, on logical shapes or on the rank with the largest shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.boxing.boxing import path_seconds
from flowrun.engine.cost.op_cost import op_seconds
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import UPDATE, LogicalGraph, LogicalTensor, Op
from flowrun.engine.ir.placement import Placement, Shape, largest_shape

Tensors = Mapping[str, LogicalTensor]


def whole_seconds(op: Op, graph: LogicalGraph, hardware: Hardware) -> float:
    """Return the seconds of an op of `graph` on logical shapes, as if on one rank of `hardware`."""
    ins = [graph.tensors[name].shape for name in op.inputs]
    outs = [None if name is None else graph.tensors[name].shape for name in op.outputs]
    return op_seconds(op, ins, outs, graph.tensors, hardware)


def local_seconds(op: Op, tensors: Tensors, grid: tuple[int, ...], hardware: Hardware) -> float:
    """Return the seconds of an op that has a signature, on one rank of `hardware`.

    tensors: those that the op reads and makes, by name.  grid: sizes of the axes of its stage.
    """
    ins, outs = local_shapes(op, tensors, grid)
    return op_seconds(op, ins, outs, tensors, hardware)


def local_shapes(
    op: Op, tensors: Tensors, grid: tuple[int, ...]
) -> tuple[list[Shape], list[Shape | None]]:
    """Return the shapes of the inputs and outputs of an op on the rank with the largest shards.

    The op has a signature.  tensors: by name.  grid: sizes of the axes of its stage.
    """
    ins = [
        largest_shape(tensors[n].shape, nd, grid)
        for n, nd in zip(op.inputs, op.in_sbp, strict=True)
    ]
    outs = [
        None if n is None else largest_shape(tensors[n].shape, nd, grid)
        for n, nd in zip(op.outputs, op.out_sbp, strict=True)
    ]
    return ins, outs


def boxing_seconds(
    graph: LogicalGraph, placements: Sequence[Placement], hardware: Hardware
) -> Iterator[tuple[Op, float]]:
    """Yield (the op that makes a tensor, seconds) of every boxing inside a stage in one
    micro-batch.

    graph: every op has a signature, except those of update.  placements: of the stages.  hardware:
    of a rank.  Boxings are counted one by one, as if none shared a message.
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
            tensor, have = graph.tensors[name], maker.sbp_of(name)
            grid, num_bytes = placements[stage].shape, tensor.num_bytes
            yield maker, path_seconds(have, nd_sbp, grid, tensor.shape, num_bytes, links[stage])


def repeated_seconds(plan: Plan, stage: int, hardware: Hardware) -> float:
    """Return the seconds that a rank of a stage of `plan` recomputes in a step, on `hardware`."""
    grid = plan.placements[stage].shape
    total = 0.0
    for actor in plan.stage_actors(stage):
        if isinstance(actor.work, RegionWork):
            again = [op for op in actor.work.ops if op.name.endswith("/again")]
            acts = plan.acts_per_step(actor)
            total += acts * sum(local_seconds(op, plan.tensors, grid, hardware) for op in again)
    return total
