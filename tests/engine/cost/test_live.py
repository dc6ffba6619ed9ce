"""What waits for backward stays within what `Live` counts for the bound, whatever is late."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import Plan
from flowrun.engine.actors.schedules import make_schedule
from flowrun.engine.cost.live import Live
from flowrun.engine.rehearsal.rehearsal import rehearse
from support.plans.unit_pipeline import unit_plan


@pytest.mark.parametrize("seed", range(8))
def test_chunks_that_keep_their_turns_hold_no_more_together_than_turns_allow(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, late = random_pipeline(seed)
    most = [Live(plan, stage).others[-1] for stage in range(len(plan.placements))]
    assert all(
        kept <= limit
        for kept, limit in zip(kept_at_most(plan, late, monkeypatch), most, strict=True)
    )


def test_without_turns_they_would_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    more = 0
    for seed in range(8):
        plan, late = random_pipeline(seed)
        most = [Live(plan, stage).others[-1] for stage in range(len(plan.placements))]
        with monkeypatch.context() as patch:
            patch.setattr("flowrun.engine.actors.scheduler.Scheduler._goes_before", lambda *_: None)
            kept = kept_at_most(plan, late, patch)
        more += any(held > limit for held, limit in zip(kept, most, strict=True))
    assert more


def test_turns_are_less_than_every_slot() -> None:
    plan = unit_plan(4, 16, "1f1b", chunks=3)
    free = make_schedule("gpipe", 4, 3, 16)
    kept = [rehearse(each, unit).bound_bytes[0] for each in (plan, replace(plan, schedule=free))]
    assert kept[0] < kept[1]


def unit(_: object) -> float:
    return 1.0


def random_pipeline(seed: int) -> tuple[Plan, dict[int, float]]:
    """Draw a pipeline of chunks, and how long each actor takes: some nothing, some very long."""
    draw = random.Random(seed)
    stages = draw.randint(2, 4)
    schedule, chunks = draw.choice((("1f1b", draw.randint(2, 4)), ("v_min", 2)))
    plan = unit_plan(stages, stages * draw.randint(1, 4), schedule, chunks)
    return plan, {actor.id: draw.choice((0, 1, 1, 9)) * draw.random() for actor in plan.actors}


def kept_at_most(
    plan: Plan, seconds: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Rehearse, and return the most bytes that waited in turn at once, by stage."""
    kept: dict[int, int] = defaultdict(int)
    add = Live._add

    def count(live: Live, storage: str, version: int, change: int) -> None:
        add(live, storage, version, change)
        kept[live.stage] = max(kept[live.stage], live.waiting[True])

    monkeypatch.setattr(Live, "_add", count)
    rehearse(plan, lambda actor: seconds[actor.id])
    return [kept[stage] for stage in range(len(plan.placements))]
