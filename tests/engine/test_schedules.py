"""Schedules emerge from register counts alone (design: stages of unit time, F = B = W = 1)."""

from __future__ import annotations

import pytest

from flowrun.engine.errors import PlanError
from flowrun.engine.rehearsal import rehearse
from flowrun.engine.schedules import held_micro_batches
from support.unit_pipeline import unit_plan, unit_seconds

TABLE = [  # stages, micro-batches, 1F1B = 3 (m + p - 1), zero bubble (ZB-H1, Qi et al. 2023)
    (2, 4, 15, 13),
    (4, 8, 33, 27),
    (8, 32, 117, 103),
]


@pytest.mark.parametrize(("stages", "micro_batches", "one_f_one_b", "zero_bubble"), TABLE)
def test_stash_credits_alone_make_1f1b_and_zero_bubble(
    stages: int, micro_batches: int, one_f_one_b: int, zero_bubble: int
) -> None:
    def time(in_flight: str) -> float:
        return rehearse(unit_plan(stages, micro_batches, in_flight), unit_seconds).first_step_s

    assert time("1f1b") == one_f_one_b
    assert time("zero_bubble") == zero_bubble


def test_gpipe_takes_as_long_as_1f1b_but_stashes_every_micro_batch() -> None:
    plan = unit_plan(4, 8, "gpipe")
    assert rehearse(plan, unit_seconds).first_step_s == 33
    assert {r.slots for r in plan.registers if r.stash} == {8}


HELD = {  # of each of 3 stages, of 8 micro-batches; of one stage by itself
    3: ([3, 3, 3], 3),
    20: ([8, 8, 8], 8),
    "gpipe": ([8, 8, 8], 8),
    "1f1b": ([3, 2, 1], 1),
    "zero_bubble": ([6, 6, 6], 1),
    "auto": ([6, 6, 6], 1),
}


@pytest.mark.parametrize("in_flight", list(HELD))
def test_a_schedule_is_how_many_micro_batches_a_stage_holds(in_flight: int | str) -> None:
    stages, alone = HELD[in_flight]
    assert [held_micro_batches(in_flight, 3, stage, 8) for stage in range(3)] == stages
    assert held_micro_batches(in_flight, 1, 0, 8) == alone


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(PlanError, match="'pipe' is no schedule"):
        held_micro_batches("pipe", 2, 0, 4)
