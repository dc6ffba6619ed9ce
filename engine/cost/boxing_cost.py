"""Seconds of the boxings of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrun.engine.boxing.boxing import path_seconds
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import UPDATE, LogicalGraph, Op
from flowrun.engine.ir.placement import Placement


def boxing_seconds(
    graph: LogicalGraph, placements: Sequence[Placement], hardware: Hardware
) -> Iterator[tuple[Op, float]]:
    """Yield (the op that makes a tensor, seconds) of every boxing inside a stage in a micro-batch.

    graph: every op has a signature, except those of update.  placements: of the stages.  Boxings
    are counted one by one, as if none shared a message.
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
