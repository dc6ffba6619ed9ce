"""Which act is owed follows from the plan and the counts of all ranks."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND, Plan
from flowrun.engine.actors.standstill import find_owed
from support.quiet_ranks import (
    COMPUTES,
    ISSUES,
    LOSES,
    READS,
    SKIPS,
    TAKES,
    Fault,
    QuietRanks,
)
from support.small_recipes import small_job
from support.unit_pipeline import unit_plan

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
STEPS = 2


@cache
def plan_of(name: str) -> Plan:
    if name.startswith("unit"):
        _, stages, micro_batches, in_flight, chunks = name.split("-")
        return unit_plan(int(stages), int(micro_batches), in_flight, int(chunks))
    return small_job(RECIPES / f"{name}.yaml", "train.micro_batches=4").training.plan


PLANS = ("unit-3-5-1f1b-1", "unit-2-4-1f1b-2", "unit-4-6-zero_bubble-1", "gpt_hybrid", "mlp_hybrid")
WHY = {
    COMPUTES: "runs",
    ISSUES: "runs",
    TAKES: "runs",
    READS: "reads",
    SKIPS: "skips",
    LOSES: "message",
}


def random_fault(plan: Plan, chance: random.Random) -> Fault:
    how = chance.choice((COMPUTES, ISSUES, TAKES, READS, SKIPS, LOSES))
    suits = {
        COMPUTES: [a for a in plan.actors if a.computes],
        READS: [a for a in plan.actors if a.runs_in_thread],
    }.get(how, [a for a in plan.actors if a.kind in (BOX, SEND, RECEIVE)])
    actor = chance.choice(suits or [a for a in plan.actors if a.computes])
    act = chance.randrange(STEPS * plan.acts_per_step(actor))
    rank = chance.choice(plan.placements[actor.stage].ranks)
    return Fault(how if suits else COMPUTES, rank, actor.id, act)


@pytest.mark.parametrize("name", PLANS)
def test_undisturbed_ranks_end(name: str) -> None:
    ranks = QuietRanks(plan_of(name), STEPS, None, seed=0)
    ranks.run()
    assert ranks.finished


@pytest.mark.parametrize("name", PLANS)
def test_the_rank_and_the_act_that_stopped_are_named_alone(name: str) -> None:
    plan, chance = plan_of(name), random.Random(name)
    for seed in range(30):
        fault = random_fault(plan, chance)
        ranks = QuietRanks(plan, STEPS, fault, seed)
        states = ranks.run()
        if ranks.finished:
            continue
        owed = find_owed(states).owed
        assert {(o.rank, o.actor, o.act) for o in owed} == {(fault.rank, fault.actor, fault.act)}, (
            fault,
            owed,
        )
        assert {o.why for o in owed} == {WHY[fault.how]}
