"""Schedules emerge from register counts alone (design: stages of unit time, F = B = W = 1)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import pytest

from flowrun.engine.actors.plan import Plan
from flowrun.engine.actors.schedules import Schedule, make_schedule
from flowrun.engine.errors import PlanError, RecipeError
from flowrun.engine.ir.graph import FORWARD, WEIGHT_GRAD
from flowrun.engine.rehearsal.clock_state import Event
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.strategy import OwnSchedule
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


# (bubble in units, micro-batches held) of p stages; bubble rates p / 2 m and 2 p / 3 m are of 6 m
# units (Qi et al. 2024, arXiv 2405.15362, table 1; its own tables let stages start one by one)
PUBLISHED: Mapping[str, Callable[[int], tuple[float, int]]] = {
    "v_zero_bubble": lambda p: (p - 1, p),
    "v_half": lambda p: (3 * p, (p + 2) // 2),
    "v_min": lambda p: (4 * p, (p + 4) // 3),
}


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_v_is_as_fast_and_as_small_as_published(name: str, stages: int) -> None:
    bubble, held = PUBLISHED[name](stages)
    plan = unit_plan(stages, 3 * stages, name, chunks=2)
    rehearsal = rehearse(plan, unit_seconds)
    late = rehearsal.first_step_s - 6 * plan.micro_batches
    assert late == bubble if name == "v_zero_bubble" else late <= bubble
    assert most_stashed(plan, rehearsal.first_step) == 2 * held  # halves of a stage
    assert rehearsal.step_s == 6 * plan.micro_batches  # the next step fills the gaps


def most_stashed(plan: Plan, events: Iterable[Event]) -> int:
    """Return the most micro-batches that a stage holds at once, of all its chunks: from the start
    of a forward to the end of its weight gradient.
    """
    changes = defaultdict(list)
    for event in events:
        phase = plan.actors[event.actor].phase
        if event.end > event.start and phase == FORWARD:
            changes[event.stage].append((event.start, 1))
        elif event.end > event.start and phase == WEIGHT_GRAD:
            changes[event.stage].append((event.end, -1))
    return max(max(accumulate(n for _, n in sorted(each))) for each in changes.values())


def test_a_v_goes_down_the_stages_and_up_again() -> None:
    schedule = make_schedule("v_half", 3, 2, 6)
    assert [schedule.stage_of(piece) for piece in range(6)] == [0, 1, 2, 2, 1, 0]
    assert schedule.last_stage == 0


def test_what_chunks_hold_is_what_their_turns_need() -> None:
    """Of 2 stages and 2 chunks: forwards 0 1 | 0 1 | 2 3 | ..., one backward for each after the
    first 4 and 2.
    """
    held = [
        [make_schedule("1f1b", 2, 2, 8).slots(stage, chunk) for chunk in range(2)]
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
    assert [make_schedule(in_flight, 3, 1, 8).slots(stage) for stage in range(3)] == stages
    assert make_schedule(in_flight, 1, 1, 8).slots(0) == alone


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(RecipeError, match="'pipe' is not a schedule"):
        make_schedule("pipe", 2, 1, 4)


@dataclass(frozen=True)
class Own(Schedule):
    """A schedule of a user's own, whose forwards wait until `late` backwards have been."""

    number: int = 2
    late: int = 0
    keeps_turns = True
    orders = True

    def held(self, stage: int, chunk: int, alone: int) -> int:
        return self.number

    def turn(self, phase: str, stage: int, chunk: int, act: int) -> int:
        return act + (self.late if phase == FORWARD else 0)


def test_a_schedule_of_ones_own_is_proved_like_the_others() -> None:
    def plan(**settings: object) -> Plan:
        return unit_plan(2, 4, OwnSchedule(Own, tuple(settings.items())))

    assert {r.slots for r in plan(number=3).registers if r.stash} == {3}
    with pytest.raises(PlanError, match="would deadlock"):
        rehearse(plan(late=1), unit_seconds)


def test_equal_tables_are_equal_schedules() -> None:
    tables = [Own(2, 1, 4, number).table() for number in (2, 2, 3)]
    assert tables[0] == tables[1] != tables[2]
