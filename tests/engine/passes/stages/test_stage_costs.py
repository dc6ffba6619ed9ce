"""What a stage is taken for before it is laid out, beside what its plan takes: a GPT-3 of six
blocks on nodes of A100s, its embedding and its head tied.
"""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from flowrun.engine.actors.plan import BOX, Plan
from flowrun.engine.compile import Compilation, Rehearsed, plan_laid_out
from flowrun.engine.ir.graph import LAID_OUT, LogicalGraph
from flowrun.engine.passes.stages.balance_stages import balance_cuts
from flowrun.engine.passes.stages.split_stages import line_to_cut
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Strategy
from flowrun.launcher.place.repeated_blocks import RepeatedBlocks, cut_after_blocks
from support.plans.small_recipes import RECIPES, small_job

DEPTH = 6
RECIPE = next(recipe for recipe in RECIPES if recipe.stem == "gpt3_175b")


@cache
def task(stages: int) -> tuple[LogicalGraph, Strategy]:
    job = small_job(
        RECIPE,
        f"model.depth={DEPTH}",
        f"placement.stages={stages}",
        "placement.in_flight=1f1b",
        "placement.axes.data=4",
        "train.batch_size=48",
        "train.micro_batches=12",
        "recompute.modules=[]",
    )
    return Compilation(
        job.materials.task, job.materials.example, job.strategy
    ).captured, job.strategy


def rehearsed(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    return plan_laid_out(advance(graph, strategy, LAID_OUT), strategy)


def busy_s(plan: Plan, stage: int) -> float:
    """Of a rank, in a step: acts and boxings of micro-batches."""
    return sum(
        actor.seconds * plan.acts_per_step(actor)
        for actor in plan.stage_actors(stage)
        if (actor.computes or actor.kind == BOX) and actor.phase not in ("weights", "update")
    )


@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_is_taken_for_what_its_plan_takes(stages: int) -> None:
    graph, strategy = task(stages)
    _, line = line_to_cut(graph, strategy)
    ranks = [len(placement.ranks) for placement in strategy.placements]
    cuts = (0, *balance_cuts(line, ranks), len(line.work_s))
    plan = rehearsed(graph, strategy).plan
    for stage, (start, end) in enumerate(itertools.pairwise(cuts)):
        foreseen = strategy.micro_batches * sum(line.work_s[start:end]) / ranks[stage]
        assert foreseen == pytest.approx(busy_s(plan, stage), rel=0.02)


@pytest.mark.parametrize("stages", [3, 6])
def test_a_cut_is_no_slower_than_one_between_blocks(stages: int) -> None:
    """With 1f1b; late weight gradients fill waits, which no sum over a stage knows of
    (docs/how_to/placement_search.md).
    """
    graph, strategy = task(stages)
    between = replace(
        strategy, decided=cut_after_blocks(graph, RepeatedBlocks("blocks", DEPTH), DEPTH // stages)
    )
    actual, even = (rehearsed(graph, each).rehearsal.step_s for each in (strategy, between))
    assert actual <= even
