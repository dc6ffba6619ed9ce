"""bound: what a step takes at least, and what a rank holds at least, before there is a plan.

Before a layout: forward and backward of a step (the update is not counted), shared out evenly over
all ranks; every variable in as many pieces.  Shards of an op take at least their part of its time,
and n micro-batches at least the time of all rows at once: overheads and what is read again come on
top.  With a layout: the work of the busiest stage, on its own shards.  Both wait for the first
micro-batch to come through the stages before; neither counts communication.  Where ranks share
cores, one that computes alone has a whole one: the way through the stages is counted so, and the
work of all ranks by the cores that there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.ir.graph import BACKWARD, FORWARD, UPDATE, LogicalGraph, Variable
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.passes.stages.stage_costs import boxing_seconds
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.strategy import Strategy
from flowrun.launcher.place.outcome import Bound
from flowrun.launcher.place.space import Branch

VARIABLES = ("parameter", "buffer", "state")


def fill_pipeline(work_s: float, forward: float, stages: int, micro_batches: int) -> float:
    """Return the least seconds of a step, for any cut into stages.

    work_s: of all micro-batches on all stages.  forward: the share of it that is forward.  stages,
    micro_batches: their numbers.

    Stage k computes w[k] for each of m micro-batches, and begins when the first has come through
    all before it: m w[k] + forward (w[0] + … + w[k-1]).  The largest of these is least where all
    are equal: w[k] = w[0] (1 - forward / m) ** k.
    """
    each = forward / micro_batches
    return work_s * each / -math.expm1(stages * math.log1p(-each)) if each < 1 else work_s


@dataclass(frozen=True)
class WholeStep:
    """All of a step, as if on one rank.  seconds: of its work, forward_s: of forward; bytes: of its
    variables.  core: the share of a core that each rank has (Hardware.core).
    """

    seconds: float
    forward_s: float
    bytes: int
    core: float = 1.0

    @staticmethod
    def of(graph: LogicalGraph, strategy: Strategy) -> WholeStep:
        """graph: captured, of all rows of a step.  strategy: of one rank."""
        graph = update_ops(split_stages(graph, strategy), strategy)
        seconds = {FORWARD: 0.0, BACKWARD: 0.0}
        for op in graph.ops:
            if op.phase != UPDATE:
                seconds[op.phase] += SizedOp.whole(op, graph.tensors).seconds(strategy.hardware)
        held = sum(graph.tensors[v.tensor].num_bytes for v in graph.variables)
        return WholeStep(sum(seconds.values()), seconds[FORWARD], held, strategy.hardware.core)

    def bound(self, branch: Branch) -> Bound:
        work = self.seconds / branch.stage_ranks
        forward = self.forward_s / self.seconds if self.seconds else 0.0
        core = self.core
        least = fill_pipeline(work, forward, branch.stages, branch.micro_batches)
        least = max(core * least, work / branch.stages)
        fill = (branch.micro_batches + branch.stages - 1) / branch.micro_batches
        expected = max(core * fill, 1.0) * work / branch.stages
        return Bound(least, self.bytes // branch.num_ranks, expected)


@dataclass(frozen=True, slots=True)
class StageWork:
    """Seconds that a rank of a stage computes: in a micro-batch, in forward alone of that, and once
    a step, on weights.
    """

    each_s: float
    forward_s: float
    once_s: float


@dataclass(frozen=True)
class LaidOutBranch:
    """A branch whose layout is decided: what a step takes, and what a rank holds.

    graph: laid out (pipeline.advance), perhaps with recomputation.
    """

    graph: LogicalGraph
    strategy: Strategy

    @cached_property
    def _work(self) -> tuple[StageWork, ...]:
        grids = [placement.shape for placement in self.strategy.placements]
        each, forward, once = ([0.0] * len(grids) for _ in range(3))
        of_weights = self.graph.of_weights
        for op in (op for op in self.graph.ops if op.phase != UPDATE):
            sized = SizedOp.local(op, self.graph.tensors, grids[op.stage])
            seconds = sized.seconds(self.strategy.hardware)
            if of_weights.issuperset(op.makes):
                once[op.stage] += seconds
                continue
            each[op.stage] += seconds
            if op.phase == FORWARD:
                forward[op.stage] += seconds
        return tuple(map(StageWork, each, forward, once))

    @cached_property
    def seconds(self) -> float:
        """The least seconds of a step: a stage begins when the first micro-batch has come through
        the stages before it, and what is made of its weights exists.
        """
        begins = itertools.accumulate((work.forward_s for work in self._work), initial=0.0)
        count = self.strategy.micro_batches
        slowest = max(
            max(begin, work.once_s) + count * work.each_s
            for begin, work in zip(begins, self._work, strict=False)  # begins has the end, too
        )
        return self._share_cores(slowest)

    def _share_cores(self, seconds: float) -> float:
        """Return the seconds of the longest path through the stages, or of all ranks' work on the
        cores that they share, whichever is more.
        """
        ranks = [len(placement.ranks) for placement in self.strategy.placements]
        count = self.strategy.micro_batches
        works = (n * (w.once_s + count * w.each_s) for n, w in zip(ranks, self._work, strict=True))
        return max(self.strategy.hardware.core * seconds, sum(works) / sum(ranks))

    @property
    def forward_s(self) -> float:
        """The seconds that all stages compute in the forward of a step."""
        return self.strategy.micro_batches * sum(work.forward_s for work in self._work)

    @cached_property
    def expected_s(self) -> float:
        """About what a step takes, with the pipeline's filling and with links, none of which is
        hidden or fused.
        """
        count, strategy = self.strategy.micro_batches, self.strategy
        stages = [work.each_s for work in self._work]
        for maker, each in boxing_seconds(self.graph, strategy.placements, strategy.hardware):
            stages[maker.stage] += each
        once_s = max(work.once_s for work in self._work)
        return self._share_cores((count - 1) * max(stages) + sum(stages) + once_s)

    def bytes(self, zero: int, kinds: Collection[str] = VARIABLES) -> int:
        """Return the least bytes of a rank under a stage of ZeRO: variables of these kinds."""
        needed = [0] * len(self.strategy.placements)
        weights = {v.name: v for v in self.graph.variables if v.kind == "parameter"}
        for v in (v for v in self.graph.variables if v.kind in kinds):
            home = weights.get(v.of, v) if v.kind == "state" else v
            needed[v.stage] += self._held(v, home, zero)
        return max(needed)

    def _held(self, v: Variable, home: Variable, zero: int) -> int:
        """Bytes of a variable; none of a state that is not as large as its weight, `home`."""
        tensor, grid = self.graph.tensors[v.tensor], self.strategy.placements[v.stage].shape
        same = self.graph.tensors[home.tensor].shape == tensor.shape
        same = same and len(home.nd_sbp) == len(grid)
        held = math.prod(largest_shape(tensor.shape, home.nd_sbp, grid)) if same else 0
        # a host may have the pieces of a weight side by side, once (lowering/share_weights.py)
        from_zero1 = v.kind == "state" or self.strategy.shared_memory
        sharded = zero >= (1 if from_zero1 else 3) and v.kind != "buffer"
        if sharded and tensor.num_elements >= self.strategy.zero.min_size:
            sizes = dict(self.strategy.placements[v.stage].axes)
            held //= sizes.get(self.strategy.zero.axis or "", 1)
        return held * tensor.dtype.itemsize
