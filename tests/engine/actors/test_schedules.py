"""Schedules emerge from register counts alone (design: stages of unit time, F = B = W = 1)."""

import pytest

from flowrun.engine.actors.schedules import micro_batches_in_flight
from flowrun.engine.errors import RecipeError
from flowrun.engine.rehearsal.rehearsal import rehearse
from support.plans.unit_pipeline import unit_plan, unit_seconds

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


INTERLEAVED = [(2, 8, 2), (4, 8, 2), (4, 16, 2), (4, 8, 4), (8, 32, 3)]


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), INTERLEAVED)
def test_chunks_divide_the_bubble(stages: int, micro_batches: int, chunks: int) -> None:
    """3 (m v + p - 1) (Narayanan et al. 2021, section 2.2.2), within an act of each chunk: what is
    ready goes before what would be next, which may gain or lose a place or two.
    """
    plan = unit_plan(stages, micro_batches, "1f1b", chunks)
    best = 3 * (micro_batches * chunks + stages - 1)
    actual = rehearse(plan, unit_seconds).first_step_s
    assert actual == pytest.approx(best, abs=chunks)
    joined = 3 * chunks * (micro_batches + stages - 1)
    assert actual < joined


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), INTERLEAVED)
def test_no_chunk_is_held_by_its_stash(stages: int, micro_batches: int, chunks: int) -> None:
    """The slots of 1F1B suffice: with all that there could be, a step is no shorter."""
    held, free = (
        rehearse(unit_plan(stages, micro_batches, in_flight, chunks), unit_seconds).first_step_s
        for in_flight in ("1f1b", "gpipe")
    )
    assert held <= free + chunks


def test_what_chunks_hold_is_what_their_turns_need() -> None:
    """Of 2 stages and 2 chunks: forwards 0 1 | 0 1 | 2 3 | ..., one backward for each after the
    first 4 and 2.
    """
    held = [
        [micro_batches_in_flight("1f1b", 2, stage, 8, chunk=chunk, chunks=2) for chunk in range(2)]
        for stage in range(2)
    ]
    assert held == [[4, 2], [3, 1]]


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
    assert [micro_batches_in_flight(in_flight, 3, stage, 8) for stage in range(3)] == stages
    assert micro_batches_in_flight(in_flight, 1, 0, 8) == alone


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(RecipeError, match="'pipe' is not a schedule"):
        micro_batches_in_flight("pipe", 2, 0, 4)
