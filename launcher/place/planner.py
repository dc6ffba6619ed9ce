"""Planner: candidates -> bounds, plans and rehearsals, by the compiler itself.

What candidates share is made once: a capture for each number of rows, a layout for each branch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from flowrun.engine.actors.schedules import schedule_of
from flowrun.engine.compile import Rehearsed, longest_equal_step, plan_boxed
from flowrun.engine.errors import FlowrunError
from flowrun.engine.ir.graph import BOXED, LAID_OUT, STAGED, LogicalGraph
from flowrun.engine.ir.module_path import unit_of
from flowrun.engine.ir.placement import BATCH_AXES, Placement
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Recompute, Strategy, Zero
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.materials import add_materials
from flowrun.launcher.job.recipe_strategy import data_workers, strategy_of
from flowrun.launcher.place.bound import LaidOutBranch, WholeStep
from flowrun.launcher.place.outcome import Bound, Outcome, outcome_of
from flowrun.launcher.place.repeated_blocks import Captures
from flowrun.launcher.place.space import Branch, Candidate, Space
from flowrun.launcher.recipe.compose import freeze, resolve, to_recipe
from flowrun.launcher.recipe.hardware_keys import rank_hardware
from flowrun.launcher.recipe.key_schema import change_keys, schema
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import RecipeSchema

KEPT_OPS = 200_000  # of layouts that are kept for later candidates: about 1 kB each
MIN_BLOCKS_TO_EXTRAPOLATE = 12  # from as many on, candidates are planned with few blocks


class Planner:
    """A planner is a PlanSource.  captures: of the recipe's job.  ranks: the number to place.

    skip_repeats: the model repeats many blocks, and few of them are planned for all.
    """

    def __init__(self, captures: Captures, ranks: int) -> None:
        self.captures = captures
        self.ranks = ranks
        self.job = job = captures.job
        self.tree = _in_order(OmegaConf.to_container(OmegaConf.create(job.recipe.text)), ranks)
        self.limit = job.strategy.hardware.tensor_bytes
        self.until = time.monotonic() + (job.recipe.auto.seconds or math.inf)
        self.problems: list[Outcome] = []  # branches that cannot be compiled
        self.plans: dict[Candidate, Rehearsed] = {}  # of those that may turn out to be the best
        placement, kept = self.tree["placement"], self.tree["auto"]["keep"]
        interleaved = placement["chunks"] > 1 and {"placement", "placement.chunks"} & {*kept}
        crooked = isinstance(placement["stages"], list) or interleaved or job.strategy.mirrored
        many = captures.blocks.count >= MIN_BLOCKS_TO_EXTRAPOLATE
        self.skip_repeats = many and not crooked and self._has_blocks_in_line()
        # layouts that differ by schedule come together; 1f1b and gpipe are expected to take as long
        staged, boxed = (1, 1) if self.skip_repeats else (2, 4)  # whole graphs are large
        self._staged, self._boxed = lru_cache(staged)(self._stage), lru_cache(boxed)(self._box)

    @staticmethod
    def of(recipe: Recipe) -> Planner:
        """Make the planner of the ranks that the recipe places."""
        return Planner(Captures(Job(recipe, values=False)), recipe.placed_ranks)

    def _has_blocks_in_line(self) -> bool:
        """Return True if one block, or two, make a model too: not if blocks lie side by side."""
        try:
            for count in (1, 2):
                self._all_rows(count)
        except FlowrunError:
            return False
        return True

    # ------------------------------------------------------------------ what is asked for

    @cached_property
    def space(self) -> Space:
        graph = self._all_rows(2 if self.skip_repeats else 0)
        return Space.of(self.tree, self.ranks, find_repeated(graph))

    def keys_of(self, candidate: Candidate) -> dict[str, Any]:
        """The recipe's keys that the candidate sets, nested."""
        keys = candidate.keys
        for key in ("stages", "chunks"):  # stages may be a list
            if f"placement.{key}" in self.space.fixed:
                del keys["placement"][key]
        if "recompute.modules" in self.space.fixed:  # with what it keeps, and how
            del keys["recompute"]
        return keys

    def recipe_of(self, candidate: Candidate) -> Recipe:
        """The recipe with the candidate's keys, as any other.  Raises RecipeError."""
        return to_recipe(self._merge(self.keys_of(candidate)))

    def strategy_of(self, candidate: Candidate) -> Strategy:
        """Return what the compiler is asked for a candidate.  Raises RecipeError.

        Its recipe is the one of recipe_of, but not by way of a tree of OmegaConf and of YAML: with
        the hundreds of numbers that measured ops bring, these would take longer than the planning.
        """
        recipe = freeze(change_keys(self._keys, self.keys_of(candidate)))
        strategy = add_materials(strategy_of(recipe), self.job.materials, data_workers(recipe))
        return replace(strategy, auto=replace(strategy.auto, seconds=self.job.recipe.auto.seconds))

    @cached_property
    def _keys(self) -> RecipeSchema:
        """The recipe's.  All candidates share what they do not set: answers that are kept of a
        hardware's ops serve all.
        """
        return resolve(self._merge({}))

    def _merge(self, keys: Mapping[str, Any]) -> DictConfig:
        base = OmegaConf.create({**self.tree, "auto": without_own(self.tree["auto"])})
        return cast(DictConfig, OmegaConf.merge(schema(), base, keys))

    # ------------------------------------------------------------------ PlanSource

    def branches(self) -> Iterator[tuple[Branch, Bound]]:
        whole = self.all_of()
        for branch in self.space.branches():
            yield branch, whole.bound(branch)

    def open(self, branch: Branch) -> Iterator[tuple[Candidate, Bound]]:
        """Its candidates, by their layouts."""
        for candidate in self.space.leaves(branch):
            try:
                strategy = self.strategy_of(candidate)
                laid_out = self._laid_out(layout_of(strategy))
            except FlowrunError as error:
                self.problems.append(Outcome(candidate, problem=str(error)))
                return
            with_zero = LaidOutBranch(laid_out.graph, strategy)
            needed = with_zero.bytes(candidate.zero)
            yield candidate, Bound(laid_out.seconds, needed, laid_out.expected_s)

    def smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        """Return the candidate with recomputation."""
        return self.space.smaller(candidate)

    @pause_collection()
    def plan(self, candidate: Candidate) -> Outcome:
        try:
            strategy = self.strategy_of(candidate)
            found = plan_boxed(self._boxed(boxing_of(strategy)), strategy)
        except FlowrunError as error:
            return Outcome(candidate, problem=str(error))
        outcome = outcome_of(candidate, found, strategy)
        if outcome.fits:
            self._keep(candidate, found)
        return outcome

    def _keep(self, candidate: Candidate, found: Rehearsed) -> None:
        """And drop those that it beats for good: a plan is large."""
        self.plans[candidate] = found
        limit = longest_equal_step(min(each.rehearsal.step_s for each in self.plans.values()))
        self.plans = {k: v for k, v in self.plans.items() if v.rehearsal.step_s <= limit}

    # ------------------------------------------------------------------ what is shared

    @cached_property
    def _laid_out(self) -> Callable[[Strategy], LaidOutBranch]:
        kept = 1 if self.skip_repeats else max(4, KEPT_OPS // len(self._all_rows().ops))
        return lru_cache(kept)(pause_collection()(self._lay_out))

    def _lay_out(self, strategy: Strategy) -> LaidOutBranch:
        staged = self._staged(staging_of(strategy))
        return LaidOutBranch(advance(staged, strategy, LAID_OUT), strategy)

    def _stage(self, strategy: Strategy) -> LogicalGraph:
        rows = self.job.recipe.train.batch_size // strategy.micro_batches
        return advance(self.captures.of(rows, strategy), strategy, STAGED)

    def _box(self, strategy: Strategy) -> LogicalGraph:
        return advance(self._laid_out(layout_of(strategy)).graph, strategy, BOXED)

    @cached_property
    def alone(self) -> Strategy:
        """The strategy of one rank that does all, as fast as each of those that are placed."""
        names = self.job.strategy.axes
        return replace(
            self.job.strategy,
            placements=(Placement(tuple((name, 1) for name in names), (0,)),),
            stage_modules=(),
            micro_batches=1,
            zero=Zero(),
            hardware=rank_hardware(self.job.recipe, self.ranks),
        )

    def all_of(self, count: int = 0) -> WholeStep:
        """Return a step of the whole model, or of one with `count` of its equal blocks."""
        return WholeStep.of(self._all_rows(count), self.alone)

    def _all_rows(self, count: int = 0) -> LogicalGraph:
        return self.captures.of(self.job.recipe.train.batch_size, self.alone, count)


def _in_order(tree: Any, ranks: int) -> Mapping[str, Any]:
    """The recipe's keys with the axes that may be chosen, in their order: it says which ranks are
    neighbours, and a merge would leave those that the recipe names where they are.
    """
    sizes = tree["placement"]["axes"]
    axes = {name: sizes.get(name, 1) for name in Space.of(tree, ranks).axes}
    return {**tree, "placement": {**tree["placement"], "axes": axes}}


def without_own(auto: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `auto` that are not the placement's: they are done with once it is found."""
    own = ("placement", "ranks", "keep", "plans", "seconds")
    return {key: value for key, value in auto.items() if key not in own}


def staging_of(strategy: Strategy) -> Strategy:
    """Reduce a strategy to what the stages depend on: equal for candidates that share them."""
    kept = strategy.in_flight if schedule_of(strategy).turns_back else "auto"
    return replace(layout_of(strategy), in_flight=kept)


def layout_of(strategy: Strategy) -> Strategy:
    """Reduce a strategy to what the layout depends on: equal for candidates that share one."""
    axis = None if strategy.zero.axis in BATCH_AXES else strategy.zero.axis
    recomputed = strategy.recompute if strategy.auto.enabled else Recompute()  # by held bytes
    return replace(boxing_of(strategy), zero=Zero(axis), recompute=recomputed)


def boxing_of(strategy: Strategy) -> Strategy:
    """Reduce a strategy to what passes depend on: equal for candidates that share a boxed graph."""
    schedule = schedule_of(strategy)
    if schedule.turns_back:
        return strategy
    return replace(strategy, in_flight="1f1b" if schedule.joined else "auto")


def find_repeated(graph: LogicalGraph) -> tuple[str, ...]:
    """Find patterns of the modules that are repeated: "blocks.*"."""
    units = {unit_of(op.module) for op in graph.ops if op.module}
    parts = (unit.rpartition(".") for unit in units)
    families = Counter(name for name, _, number in parts if name and number.isdigit())
    return tuple(f"{name}.*" for name, count in sorted(families.items()) if count > 1)
