"""reduced_depth: plan candidates of a model of many equal blocks with few of them (extrapolate.py).

It is a PlanSource, as the planner of the whole model is; only what it finds best is planned whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache

from flowrun.engine.compile import plan_laid_out
from flowrun.engine.cost.stored import stored_bytes
from flowrun.engine.errors import FlowrunError
from flowrun.engine.ir.graph import LAID_OUT, LogicalGraph
from flowrun.engine.passes.recompute import recompute
from flowrun.engine.passes.stages.split_stages import line_to_cut
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Recompute, Strategy
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.place.bound import LaidOutBranch, WholeStep, fill_pipeline
from flowrun.launcher.place.extrapolate import (
    ReducedDepthPlan,
    extrapolate,
    most_in_flight,
    scale_in_flight,
)
from flowrun.launcher.place.outcome import Bound, Outcome
from flowrun.launcher.place.planner import Planner, layout_of
from flowrun.launcher.place.repeated_blocks import cut_after_blocks, cut_evenly
from flowrun.launcher.place.space import Branch, Candidate

MAX_PLANS = 24  # of candidates; auto.plans may say fewer
MAX_STAGES = 3  # of a plan: the first, one between, the last
# stages of a plan -> blocks of each stage, in two plans
BLOCKS_PER_STAGE = {1: (3, 6), 2: (3, 4), MAX_STAGES: (1, 2)}
# Of three stages that stand for ones of at least 3 blocks: what is gathered ahead of a block is
# there as a whole only where another block follows.
MIN_DEEP_BLOCKS, BLOCKS_PER_DEEP_STAGE = 3, (2, 3)


@dataclass(frozen=True)
class DepthBound:
    """A branch with one choice of recomputation, whatever its ZeRO and schedule.

    one, two: layouts of the model with one block and with two, on one stage.  blocks: of the whole
        model.  Work, memory and bytes are linear in the blocks.
    """

    one: LaidOutBranch
    two: LaidOutBranch
    blocks: int
    branch: Branch

    def bound(self, candidate: Candidate) -> Bound:
        """Return the bound of a candidate; expected_s only orders candidates.

        A further stage makes the step longer by a micro-batch of it, whatever the schedule: weight
        gradients that run late fill the waits, but the way of the first activation and of the last
        gradient becomes no shorter, and nothing of their communication is hidden there.
        """
        stages, count = self.branch.stages, self.branch.micro_batches
        work = self._per_stage(lambda laid_out: laid_out.seconds)
        busy = self._per_stage(lambda laid_out: laid_out.expected_s)
        held = self._per_stage(lambda laid_out: laid_out.bytes(candidate.zero))
        forward_s = self._per_stage(lambda laid_out: laid_out.forward_s)
        in_flight = most_in_flight(candidate, stages, stages)
        core = self.one.strategy.hardware.core
        least = fill_pipeline(work * stages, forward_s / work if work else 0.0, stages, count)
        expected = busy * (1 + (stages - 1) / count) + self._reduction_s(candidate.zero)
        return Bound(max(core * least, work), round(held + in_flight * self._stored), expected)

    def _per_stage(self, of: Callable[[LaidOutBranch], float]) -> float:
        one, two = of(self.one), of(self.two)
        return (one + (self.blocks - 1) * (two - one)) / self.branch.stages

    def _reduction_s(self, zero: int) -> float:
        """Return seconds of reducing gradients on the axis of the batch, and of gathering weights
        under ZeRO 3.  Of the two passes of an all-reduce one overlaps the last micro-batch.
        """
        strategy = self.one.strategy
        if strategy.zero.axis not in strategy.axes:
            return 0.0
        links = strategy.hardware.links(strategy.placements[0])
        link = links[strategy.axes.index(strategy.zero.axis)]
        weights = self._per_stage(lambda laid_out: laid_out.bytes(0, ("parameter",)))
        often = 3 * self.branch.micro_batches if zero == 3 else 1
        return often * weights / link.bytes_per_s

    @cached_property
    def _stored(self) -> float:
        """Bytes that wait for the backward of one micro-batch."""
        return self._per_stage(lambda laid: stored_bytes(laid.graph, laid.strategy, 0))


class ReducedDepthPlanner:
    """A PlanSource.  planner: of the whole model.  skipped: how many branches it left out."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.blocks, self.space = planner.captures.blocks, planner.space
        self.skipped = 0
        self._laid_out = lru_cache(maxsize=64)(self._lay_out)
        self._depth_bound = lru_cache(maxsize=8)(self._bound_branch)
        self._cuts = lru_cache(maxsize=8)(self._cut)

    # ------------------------------------------------------------------ PlanSource

    def branches(self) -> Iterator[tuple[Branch, Bound]]:
        one, two = (self.planner.all_of(count) for count in (1, 2))
        more, pairs = self.blocks.count - 1, zip(astuple(one), astuple(two), strict=True)
        whole = WholeStep(*(a + more * (b - a) for a, b in pairs))
        for branch in self.space.branches():
            if self._sensible(branch):
                yield branch, whole.bound(branch)
            else:
                self.skipped += 1

    def _sensible(self, branch: Branch) -> bool:
        """No more stages than blocks, or than micro-batches; axes that do not divide the batch
        within what the innermost links join.
        """
        if branch.stages > min(self.blocks.count, branch.micro_batches):
            return False
        node = self.planner.alone.hardware.levels[0].ranks
        inner = math.prod(n for name, n in branch.axes if name not in self.space.batch_axes)
        return not node or node % inner == 0 or "placement.axes" in self.space.fixed

    def open(self, branch: Branch) -> Iterator[tuple[Candidate, Bound]]:
        """Yield, for each schedule and stage of ZeRO, the least recomputation that may fit; more of
        ZeRO only where it saves recomputation, or makes the candidate fit.
        """
        least: dict[int | str, tuple[bool, int]] = {}
        try:
            for leaf in self._leaves(branch):
                options = (leaf, *self.space.smaller(leaf))
                fit = (each for each in options if self._may_fit(self.bound(each)))
                found = next(fit, options[-1])
                bound = self.bound(found)
                rank = not self._may_fit(bound), _repeats(found)
                if leaf.in_flight not in least or rank < least[leaf.in_flight]:
                    least[leaf.in_flight] = rank
                    yield found, bound
        except FlowrunError as error:
            self.planner.problems.append(Outcome(Candidate(branch), problem=str(error)))

    def _may_fit(self, bound: Bound) -> bool:
        return not self.planner.limit or bound.bytes <= self.planner.limit

    def smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield more recomputation, or, if there is no more of it, more of ZeRO."""
        options: tuple[Candidate, ...] = (candidate,)
        if "recompute.modules" not in self.space.fixed:
            leaf = replace(candidate, recompute=(), keep=())
            options = (leaf, *self.space.smaller(leaf))
        more = options[options.index(candidate) + 1 :]
        if not more:
            leaves = self._leaves(candidate.branch)
            zeros = {leaf.zero for leaf in leaves if leaf.zero > candidate.zero}
            more = tuple(replace(candidate, zero=zero) for zero in sorted(zeros)[:1])
        yield from more[:1]

    def _leaves(self, branch: Branch) -> Iterator[Candidate]:
        """Yield schedules that fix how many micro-batches are in flight, for any memory.  gpipe
        only if the recipe's must stay: it takes as long as 1f1b, and holds more.
        """
        stays = "placement.in_flight" in self.space.fixed
        for leaf in self.space.leaves(branch):
            if leaf.in_flight == "auto" and branch.stages > 1 and not stays:
                yield replace(leaf, in_flight="zero_bubble")
                yield replace(leaf, in_flight=branch.stages)
            elif leaf.in_flight != "gpipe" or stays:
                yield leaf

    def bound(self, candidate: Candidate) -> Bound:
        recomputed = Recompute(candidate.recompute, candidate.keep)
        return self._depth_bound(candidate.branch, recomputed).bound(candidate)

    def _bound_branch(self, branch: Branch, recomputed: Recompute) -> DepthBound:
        whole = self.planner.strategy_of(Candidate(branch))
        strategy = replace(
            whole,
            placements=whole.placements[:1],
            in_flight="1f1b",
            zero=replace(whole.zero, axis=self.space.zero_axis),
            recompute=recomputed,
        )
        graphs = (self._laid_out(layout_of(strategy), count, 0) for count in (1, 2))
        one, two = (LaidOutBranch(recompute(graph, strategy), strategy) for graph in graphs)
        return DepthBound(one, two, self.blocks.count, branch)

    @pause_collection()
    def plan(self, candidate: Candidate) -> Outcome:
        """Plan a candidate with few blocks and with more, and extrapolate the whole."""
        stages = min(MAX_STAGES, candidate.branch.stages)
        deep = stages == MAX_STAGES and self.blocks.count >= MIN_DEEP_BLOCKS * (
            candidate.branch.stages
        )
        depths = BLOCKS_PER_DEEP_STAGE if deep else BLOCKS_PER_STAGE[stages]
        try:
            whole = self.planner.strategy_of(candidate)
            few, more = (self._short(whole, stages, each) for each in depths)
            cuts = self._cuts(candidate.branch)
        except FlowrunError as error:
            return Outcome(candidate, problem=str(error))
        return extrapolate(candidate, self.blocks.count, cuts, (few, more), self.planner.limit)

    def _cut(self, branch: Branch) -> tuple[float, ...]:
        """Return the number of blocks on each stage."""
        whole = self.planner.strategy_of(Candidate(branch))
        if branch.stages == 1:
            return (float(self.blocks.count),)
        rows = self.planner.job.recipe.train.batch_size // branch.micro_batches
        line = line_to_cut(self.planner.captures.of(rows, whole, 2), whole)
        ranks = [len(placement.ranks) for placement in whole.placements]
        return cut_evenly(*line, self.blocks, ranks)

    # ------------------------------------------------------------------ short plans

    def _short(self, whole: Strategy, stages: int, each: int) -> ReducedDepthPlan:
        """Plan the first stage of the whole, one between and the last, with `each` blocks each."""
        last = len(whole.placements) - 1
        kept = sorted({0, last} if stages < MAX_STAGES else {0, last // 2, last})
        strategy = replace(
            whole,
            placements=tuple(whole.placements[k] for k in kept),
            in_flight=scale_in_flight(whole.in_flight, len(whole.placements), stages),
            hardware=replace(whole.hardware, memory_bytes=0),
        )
        graph = self._laid_out(layout_of(strategy), each * stages, each)
        return ReducedDepthPlan(each, plan_laid_out(graph, strategy), strategy)

    def _lay_out(self, strategy: Strategy, count: int, each: int) -> LogicalGraph:
        rows = self.planner.job.recipe.train.batch_size // strategy.micro_batches
        graph = self.planner.captures.of(rows, strategy, count)
        if len(strategy.placements) > 1:
            strategy = replace(strategy, decided=cut_after_blocks(graph, self.blocks, each))
        return advance(graph, strategy, LAID_OUT)


def _repeats(candidate: Candidate) -> int:
    """0: nothing; 2: all."""
    return (1 if candidate.keep else 2) if candidate.recompute else 0
