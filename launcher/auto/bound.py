"""bound: what a step takes at least, and what a rank holds at least, before there is a plan.

Before a layout: all work of a step, shared out evenly over all ranks; every variable in as many
pieces.  Shards of an op take at least their part of its time, and n micro-batches at least the time
of all rows at once: overheads and what is read again come on top.  With a layout: the work of the
busiest stage, on its own shards.  Neither counts communication, nor waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from flowrun.engine.boxing import path_seconds
from flowrun.engine.cost.op_cost import op_seconds
from flowrun.engine.cost.seconds import local_seconds
from flowrun.engine.graph import UPDATE, LogicalGraph, Op, Variable
from flowrun.engine.passes.split_stages import split_stages
from flowrun.engine.passes.update_ops import update_ops
from flowrun.engine.placement import largest_shape
from flowrun.engine.sbp import NdSbp
from flowrun.engine.strategy import Strategy
from flowrun.launcher.auto.outcome import Bound
from flowrun.launcher.auto.space import Branch

VARIABLES = ("parameter", "buffer", "state")


@dataclass(frozen=True)
class Whole:
    """All of a step, as if on one rank.  seconds: of its work; bytes: of its variables."""

    seconds: float
    bytes: int

    @staticmethod
    def of(graph: LogicalGraph, strategy: Strategy) -> Whole:
        """graph: captured, of all rows of a step.  strategy: of one rank."""
        graph = update_ops(split_stages(graph, strategy), strategy)
        shape = {name: tensor.shape for name, tensor in graph.tensors.items()}
        seconds = sum(
            op_seconds(
                op,
                [shape[n] for n in op.inputs],
                [n and shape[n] for n in op.outputs],  # type: ignore[misc]
                graph.tensors,
                strategy.hardware,
            )
            for op in graph.ops
            if op.phase != UPDATE
        )
        return Whole(seconds, sum(graph.tensors[v.tensor].num_bytes for v in graph.variables))

    def bound(self, branch: Branch) -> Bound:
        """Of all candidates of a branch."""
        seconds = self.seconds / branch.num_ranks
        fill = (branch.micro_batches + branch.stages - 1) / branch.micro_batches
        return Bound(seconds, self.bytes // branch.num_ranks, seconds * fill)


@dataclass(frozen=True)
class LaidOut:
    """A branch whose layout is decided: for each stage what a micro-batch takes."""

    graph: LogicalGraph
    strategy: Strategy

    @cached_property
    def _work(self) -> tuple[list[float], list[float]]:
        """Seconds of each stage: of a micro-batch, and once a step."""
        grids = [placement.shape for placement in self.strategy.placements]
        each, once = [0.0] * len(grids), [0.0] * len(grids)
        of_weights = self.graph.of_weights
        for op in (op for op in self.graph.ops if op.phase != UPDATE):
            into = once if of_weights.issuperset(op.makes) else each
            into[op.stage] += local_seconds(op, self.graph, grids[op.stage], self.strategy.hardware)
        return each, once

    @cached_property
    def _link_s(self) -> list[float]:
        """Seconds of each stage's links in a micro-batch, nothing of it fused."""
        total = [0.0] * len(self.strategy.placements)
        wanted = {
            (name, nd_sbp, op.stage): None
            for op in self.graph.ops
            if op.phase != UPDATE
            for name, nd_sbp in zip(op.inputs, op.in_sbp, strict=True)
        }
        for name, nd_sbp, stage in wanted:
            maker = self.graph.producer.get(name)
            if maker is not None and maker.stage == stage:
                tensor, grid = self.graph.tensors[name], self.strategy.placements[stage].shape
                links = self.strategy.hardware.links(self.strategy.placements[stage])
                total[stage] += path_seconds(
                    _made_as(maker, name), nd_sbp, grid, tensor.shape, tensor.num_bytes, links
                )
        return total

    @cached_property
    def seconds(self) -> float:
        """At least."""
        count = self.strategy.micro_batches
        return max(count * each + once for each, once in zip(*self._work, strict=True))

    @cached_property
    def expected_s(self) -> float:
        """With the pipeline's filling and with links, none of which is hidden."""
        count = self.strategy.micro_batches
        stages = [a + b for a, b in zip(self._work[0], self._link_s, strict=True)]
        return (count - 1) * max(stages) + sum(stages) + max(self._work[1])

    def bytes(self, zero: int, kinds: Collection[str] = VARIABLES) -> int:
        """At least, of a rank, under a stage of ZeRO: weights, buffers and states."""
        needed = [0] * len(self.strategy.placements)
        by_name = {v.name: v for v in self.graph.variables if v.kind == "parameter"}
        for v in (v for v in self.graph.variables if v.kind in kinds):
            needed[v.stage] += self._held(v, by_name, zero)
        return max(needed)

    def _held(self, v: Variable, by_name: Mapping[str, Variable], zero: int) -> int:
        tensor, grid = self.graph.tensors[v.tensor], self.strategy.placements[v.stage].shape
        home = by_name.get(v.name.partition("/")[2], v) if v.kind == "state" else v
        same = self.graph.tensors[home.tensor].shape == tensor.shape and len(home.nd_sbp) == len(
            grid
        )
        held = math.prod(largest_shape(tensor.shape, home.nd_sbp, grid)) if same else 0
        sharded = zero >= (1 if v.kind == "state" else 3) and v.kind != "buffer"
        if sharded and tensor.num_elements >= self.strategy.zero.min_elements:
            sizes = dict(self.strategy.placements[v.stage].axes)
            held //= sizes.get(self.strategy.zero.axis, 1)
        return held * tensor.dtype.itemsize


def _made_as(maker: Op, name: str) -> NdSbp:
    return maker.out_sbp[maker.outputs.index(name)]
