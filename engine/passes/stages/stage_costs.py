"""weigh_line: the seconds of each op of forward's line, with all ops that follow it.

The whole model is laid out on the ranks of one stage, as if there were no other: every op on its
own shards, with its boxings, accumulators and a share of the update.  Logical shapes alone would
mislead: ops that only weights enter (accumulators, the zeros of an embedding's gradient) take the
ranks of a data axis equally long however many they are, and each rank of a tensor axis computes
whole what the axis does not split.

Invariant: the pieces of a stage sum to what its actors compute and box for a micro-batch in the
plan, except for acts, messages between stages and recomputation.  These are left out so that
candidates which differ by them can share a layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flowrun.engine.boxing.boxing import path_seconds
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import UPDATE, LogicalGraph, Op
from flowrun.engine.ir.placement import Placement, largest_shape
from flowrun.engine.passes.layout.infer_sbp import infer_sbp
from flowrun.engine.passes.sum_tied_gradients import sum_tied_gradients
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.strategy import Strategy

TENSORS_PER_UPDATE = 7  # AdamW reads a weight, its gradient and two states, and writes three


def weigh_line(
    graph: LogicalGraph, places: Mapping[str, int], length: int, strategy: Strategy
) -> list[float]:
    """Return the seconds that a rank takes in a micro-batch for each of `length` ops of the line.

    graph: staged, all on one stage.  places: name of an op -> the op of the line that it follows;
    ops that are not there follow their inputs.  strategy: as one_stage returns it.
    """
    graph = _add_accumulators(graph, places, strategy)
    # inferred though the plan's layout may be searched: that would take several times as long
    graph = infer_sbp(graph, strategy)
    hardware, micro_batches = strategy.hardware, strategy.micro_batches
    seconds = [0.0] * length
    place_of: dict[str, int] = {}  # tensor -> the op of the line
    for op in (op for op in graph.ops if op.phase != UPDATE):
        sources = (place_of[name] for name in op.inputs if name in place_of)
        at = places[op.name] if op.name in places else next(sources, 0)
        place_of.update(dict.fromkeys(op.makes, at))
        sized = SizedOp.local(op, graph.tensors, strategy.placements[0].shape)
        each = sized.seconds(hardware)
        once = graph.of_weights.issuperset(op.makes)
        seconds[at] += each / micro_batches if once else each
    for maker, each in boxing_seconds(graph, strategy.placements, hardware):
        once = graph.of_weights.issuperset(maker.makes)
        seconds[place_of[maker.makes[0]]] += each / micro_batches if once else each
    for variable, bytes_each in _updated_bytes(graph, strategy):
        homes = [place_of[n] for op in graph.consumers[variable] for n in op.makes if n in place_of]
        if homes:
            moved = TENSORS_PER_UPDATE * bytes_each / micro_batches
            seconds[min(homes)] += moved / hardware.memory_bytes_per_s
    return seconds


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


def one_stage(strategy: Strategy) -> Strategy:
    """Return the strategy of the first stage alone, or of one rank if grids of stages differ."""
    first = strategy.placements[0]
    if any(placement.shape != first.shape for placement in strategy.placements):
        first = Placement(tuple((name, 1) for name, _ in first.axes), first.ranks[:1])
    return replace(strategy, placements=(first,))


def _add_accumulators(
    graph: LogicalGraph, places: Mapping[str, int], strategy: Strategy
) -> LogicalGraph:
    """Return the graph with accumulators.

    If several ops of the line read a weight, each gets an accumulator, as on stages of their own.
    """
    apart = tuple(replace(op, stage=places[op.name]) for op in graph.ops)
    graph = replace(graph, ops=apart)
    for rewrite in (sum_tied_gradients, update_ops):
        graph = rewrite(graph, strategy)
    return replace(graph, ops=tuple(replace(op, stage=0) for op in graph.ops))


def _updated_bytes(graph: LogicalGraph, strategy: Strategy) -> Iterator[tuple[str, float]]:
    """Yield (tensor of a parameter, bytes of it on the rank with its largest shard).

    ZeRO is left out: candidates of auto.placement that differ by it share their cut.
    """
    grid = strategy.placements[0].shape
    for v in graph.variables:
        if v.kind == "parameter":
            tensor = graph.tensors[v.tensor]
            shape = largest_shape(tensor.shape, v.nd_sbp, grid)
            yield v.tensor, math.prod(shape) * tensor.dtype.itemsize
