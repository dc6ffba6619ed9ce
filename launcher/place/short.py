"""short: candidates of a model of many equal blocks, by plans of few of them (extrapolate.py).

A Source as the planner of the whole model is; only what it finds best is planned whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache

from flowrun.engine.compile import plan_laid_out
from flowrun.engine.errors import FlowrunError
from flowrun.engine.ir.graph import LAID_OUT, LogicalGraph
from flowrun.engine.passes.stages.split_stages import line_to_cut
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Strategy
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.place.blocks import cut, cut_evenly
from flowrun.launcher.place.bound import Whole
from flowrun.launcher.place.extrapolate import Short, extrapolated, scaled
from flowrun.launcher.place.outcome import Bound, Outcome
from flowrun.launcher.place.outline import Outlines
from flowrun.launcher.place.planner import Planner, layout_of
from flowrun.launcher.place.space import Branch, Candidate, Space

PLANS = 24  # of candidates, at most; auto.plans may say fewer
STAGES = 3  # of a plan: a first, one between, a last
# Stages of a plan -> blocks of a stage, in two plans; of one that stands for stages of DEEP blocks
# or more, DEEPER: what is gathered ahead of a block is there as a whole only where others follow.
DEPTHS = {1: (3, 6), 2: (3, 4), STAGES: (1, 2)}
DEEP, DEEPER = 3, (2, 3)


class ShortPlanner:
    """A search.Source.  planner: of the whole model.  skipped: branches that are not looked at."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.blocks = planner.captures.blocks
        self.skipped = 0
        self._laid_out = lru_cache(maxsize=64)(self._lay_out)

    @cached_property
    def space(self) -> Space:
        """Of the whole model."""
        return self.planner.space

    # ------------------------------------------------------------------ search.Source

    def branches(self) -> Iterator[tuple[Branch, Bound]]:
        """Those that make sense."""
        one, two = (self.planner.all_of(count) for count in (1, 2))
        more = self.blocks.count - 1
        whole = Whole(
            one.seconds + more * (two.seconds - one.seconds),
            one.forward_s + more * (two.forward_s - one.forward_s),
            one.bytes + more * (two.bytes - one.bytes),
            one.core,
        )
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
        """For each schedule and stage of ZeRO the least recomputation that may fit; more of ZeRO
        only where it saves recomputation, or makes it fit.
        """
        least: dict[int | str, tuple[bool, int]] = {}
        try:
            outlines = self.outlines(branch)
            for leaf in self._leaves(branch):
                options = (leaf, *self.space.smaller(leaf))
                fit = (each for each in options if self._may_fit(outlines.bound(each)))
                found = next(fit, options[-1])
                bound = outlines.bound(found)
                rank = not self._may_fit(bound), _repeats(found)
                if leaf.in_flight not in least or rank < least[leaf.in_flight]:
                    least[leaf.in_flight] = rank
                    self.planner.expected[found] = bound.expected_s
                    yield found, bound
        except FlowrunError as error:
            self.planner.problems.append(Outcome(Candidate(branch), problem=str(error)))

    def _may_fit(self, bound: Bound) -> bool:
        return not self.planner.limit or bound.bytes <= self.planner.limit

    def smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        """More recomputation; or, once there is no more of it, more of ZeRO."""
        options: tuple[Candidate, ...] = (candidate,)
        if "recompute.modules" not in self.space.fixed:
            leaf = replace(candidate, recompute=(), keep=())
            options = (leaf, *self.space.smaller(leaf))
        more = options[options.index(candidate) + 1 :]
        if not more:
            leaves = self._leaves(candidate.branch)
            zeros = {leaf.zero for leaf in leaves if leaf.zero > candidate.zero}
            more = tuple(replace(candidate, zero=zero) for zero in sorted(zeros)[:1])
        for each in more[:1]:
            self.planner.expected[each] = self.planner.expected[candidate]
            yield each

    def _leaves(self, branch: Branch) -> Iterator[Candidate]:
        """With schedules that say how many micro-batches are in flight, whatever the memory.  gpipe
        only where the recipe's is to stay: it takes as long as 1f1b, and holds more.
        """
        stays = "placement.in_flight" in self.space.fixed
        for leaf in self.space.leaves(branch):
            if leaf.in_flight == "auto" and branch.stages > 1 and not stays:
                yield replace(leaf, in_flight="zero_bubble")
                yield replace(leaf, in_flight=branch.stages)
            elif leaf.in_flight != "gpipe" or stays:
                yield leaf

    def outlines(self, branch: Branch) -> Outlines:
        """Bounds of its candidates, by the layouts of one block and of two."""
        whole = self.planner.strategy_of(Candidate(branch))
        strategy = replace(
            whole,
            placements=whole.placements[:1],
            in_flight="1f1b",
            zero=replace(whole.zero, axis=self.space.zero_axis),
        )
        return Outlines(branch, self.blocks.count, strategy, self._on_one_stage)

    @pause_collection()
    def plan(self, candidate: Candidate) -> Outcome:
        """Plan it with few blocks and with more, and tell what the whole will take."""
        stages = min(STAGES, candidate.branch.stages)
        deep = stages == STAGES and self.blocks.count >= DEEP * candidate.branch.stages
        depths = DEEPER if deep else DEPTHS[stages]
        try:
            whole = self.planner.strategy_of(candidate)
            few, more = (self._short(whole, stages, each) for each in depths)
            cuts = self._cuts(candidate.branch, whole)
        except FlowrunError as error:
            return Outcome(candidate, problem=str(error))
        told = extrapolated(candidate, self.blocks.count, cuts, (few, more), self.planner.limit)
        return replace(told, expected_s=self.planner.expected.get(candidate, 0.0))

    def _cuts(self, branch: Branch, whole: Strategy) -> tuple[float, ...]:
        """How many blocks each stage has."""
        if branch.stages == 1:
            return (float(self.blocks.count),)
        rows = self.planner.job.recipe.train.batch_size // branch.micro_batches
        line = line_to_cut(self.planner.captures.of(rows, whole, 2), whole)
        ranks = [len(placement.ranks) for placement in whole.placements]
        return cut_evenly(*line, self.blocks, ranks)

    # ------------------------------------------------------------------ short plans

    def _short(self, whole: Strategy, stages: int, each: int) -> Short:
        """The first stage of the whole, one between and the last, with so many blocks each."""
        last = len(whole.placements) - 1
        kept = sorted({0, last} if stages < STAGES else {0, last // 2, last})
        strategy = replace(
            whole,
            placements=tuple(whole.placements[k] for k in kept),
            in_flight=scaled(whole.in_flight, len(whole.placements), stages),
            hardware=replace(whole.hardware, memory_bytes=0),
        )
        graph = self._laid_out(layout_of(strategy), each * stages, each)
        return Short(each, plan_laid_out(graph, strategy), strategy)

    def _on_one_stage(self, strategy: Strategy, count: int) -> LogicalGraph:
        return self._laid_out(layout_of(strategy), count, 0)

    def _lay_out(self, strategy: Strategy, count: int, each: int) -> LogicalGraph:
        rows = self.planner.job.recipe.train.batch_size // strategy.micro_batches
        graph = self.planner.captures.of(rows, strategy, count)
        if len(strategy.placements) > 1:
            strategy = replace(strategy, decided=cut(graph, self.blocks, each))
        return advance(graph, strategy, LAID_OUT)


def _repeats(candidate: Candidate) -> int:
    """0: nothing; 2: all."""
    return (1 if candidate.keep else 2) if candidate.recompute else 0
