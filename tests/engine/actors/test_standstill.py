import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND, Plan
from flowrun.engine.actors.standstill import Owed, RankState, describe_owed, find_owed
from support.plans.quiet_ranks import (
    COMPUTES,
    ISSUES,
    LOSES,
    READS,
    SKIPS,
    TAKES,
    Fault,
    QuietRanks,
)
from support.plans.small_recipes import small_job
from support.plans.unit_pipeline import unit_plan

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


def quiet(name: str, fault: Fault, seed: int = 1) -> dict[int, RankState]:
    """What the ranks of a plan count when they have come to a standstill."""
    return QuietRanks(plan_of(name), STEPS, fault, seed).run()


def stopped_in_a_forward(name: str) -> tuple[Fault, dict[int, RankState]]:
    """A rank of the last stage stops as it computes."""
    plan = plan_of(name)
    actor = next(a for a in plan.actors if a.computes and a.stage == len(plan.placements) - 1)
    fault = Fault(COMPUTES, plan.placements[-1].ranks[0], actor.id, 1)
    return fault, quiet(name, fault)


def test_a_rank_that_a_signal_stopped_while_it_slept_owes_what_is_asked_of_it() -> None:
    plan = plan_of("gpt_hybrid")
    collective = next(a for a in plan.actors if a.kind == BOX)
    rank, other = plan.placements[collective.stage].ranks[:2]
    states = quiet("gpt_hybrid", Fault(ISSUES, rank, collective.id, 1))
    asleep = replace(
        states[rank],
        at=None,
        halted="is stopped by a signal",
        begun=[n - (k == collective.id) for k, n in enumerate(states[rank].begun)],
    )
    standstill = find_owed(states | {rank: asleep})
    (owed,) = standstill.owed
    assert (owed.rank, owed.why) == (rank, "halted")
    said = describe_owed(owed, states | {rank: asleep})
    assert said.startswith(f"rank {rank} is stopped by a signal; it owes actor ")
    assert any(f"for rank {rank} to come to it" in line for line in standstill.waits[other])


def test_a_rank_of_another_host_is_named_where_its_counts_are_not_known() -> None:
    fault, states = stopped_in_a_forward("gpt_hybrid")
    here = {rank: state for rank, state in states.items() if rank < 2}
    owed = find_owed(here).owed
    assert {o.why for o in owed} == {"absent"}
    assert fault.rank in {o.rank for o in owed}
    assert "of another host, has not begun actor" in describe_owed(owed[0], here)


def test_a_rank_that_is_not_in_its_steps_yet_is_named_by_what_it_does() -> None:
    _, states = stopped_in_a_forward("unit-3-5-1f1b-1")
    before = RankState(activity="makes its weights", entered=0)
    owed = find_owed(states | {2: before}).owed
    assert [(o.rank, o.why) for o in owed] == [(2, "elsewhere")]
    assert describe_owed(owed[0], states | {2: before}) == "rank 2 makes its weights."


def test_ranks_that_have_ended_their_steps_wait_for_one_that_has_not() -> None:
    fault, states = stopped_in_a_forward("unit-3-5-1f1b-1")
    rests = RankState(activity="waits for the other ranks", entered=2)
    standstill = find_owed({0: rests, 1: rests, 2: states[2]})
    assert standstill.owed == (Owed(2, fault.actor, 1, "runs"),)
    assert standstill.waits[0] == ("rank 0 waits for the other ranks; not so far: rank 2",)


def test_a_rank_that_does_nothing_between_two_acts_is_named_with_the_last() -> None:
    fault, states = stopped_in_a_forward("unit-3-5-1f1b-1")
    done = list(states[fault.rank].done)
    done[fault.actor] += 1
    states[fault.rank] = replace(states[fault.rank], done=done)
    (owed,) = find_owed(states).owed
    assert owed == Owed(fault.rank, fault.actor, 1, "after")
    assert "does nothing since" in describe_owed(owed, states)


def test_where_all_ranks_do_the_same_outside_of_steps_each_may_owe_it() -> None:
    saves = RankState(activity="saves a checkpoint", entered=7)
    halted = replace(saves, halted="sleeps in the kernel (folio_wait), as on a disk that hangs")
    assert [o.rank for o in find_owed({0: saves, 1: saves}).owed] == [0, 1]
    assert find_owed({0: saves, 1: halted}).owed[0] == Owed(1, None, 0, "halted")
