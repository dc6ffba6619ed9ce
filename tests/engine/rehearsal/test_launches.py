"""The order of launches cannot stop a run: on random plans, at any speed, on the hardest device."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import pytest

from flowrun.engine.actors.communicators import communicators_of, disjoint_calls
from flowrun.engine.actors.plan import RECEIVE, Actor, Plan, TransferWork
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.errors import PlanError
from flowrun.engine.rehearsal.launches import check_line
from flowrun.engine.rehearsal.rehearsal import rehearse
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import gpt
from support.plans.devices import Room, play
from support.plans.one_order import in_one_order
from support.plans.unit_pipeline import unit_plan

WIDE = 1000  # of what is not asked about
LAYOUTS = (
    Layout(data=2, tensor=2, stages=2, clip_norm=0.1),
    Layout(data=2, stages=2, chunks=2, zero=3),
    Layout(data=2, tensor=2, zero=2, clip_norm=0.1),
    Layout(tensor=2, stages=2, chunks=2),
)


@cache
def with_axes(layout: Layout) -> Plan:
    return compiled(gpt(blocks=2, width=16, samples=8, micro_batches=4), layout).plan


def random_plan(choose: random.Random) -> Plan:
    """In one order, found at random speeds."""
    if choose.random() < 0.3:
        plan = with_axes(choose.choice(LAYOUTS))
    else:
        stages, chunks = choose.randint(2, 5), choose.choice((1, 1, 2, 3))
        v_shapes = ("v_zero_bubble", "v_half", "v_min") if chunks == 2 else ()
        schedule = choose.choice(("1f1b", "gpipe", "zero_bubble", 1, 2, *v_shapes))
        plan = unit_plan(stages, choose.randint(1, 9), schedule, chunks)
    speeds = [choose.choice((0.0, 0.1, 1.0, 1.0, 5.0)) for _ in plan.actors]
    return in_one_order(plan, lambda actor: speeds[actor.id])


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.thorough)], ids=len
)
def test_no_random_plan_stops_with_room_for_one_kernel(seeds: range) -> None:
    for seed in seeds:
        play(random_plan(random.Random(f"launches {seed}")))


def with_order(plan: Plan, stage: int, change: Callable[[list], list]) -> Plan:
    """Change the one order of a stage."""
    order = tuple((k, tuple(change(list(v))) if k[0] == stage else v) for k, v in plan.order)
    return replace(plan, order=order, due=())


def receive_first(plan: Plan, order: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(order, key=lambda each: plan.actors[each[0]].kind != RECEIVE)


PLANTED: Mapping[str, Callable[[Plan], Plan]] = {
    "a receive before all sends": lambda p: with_order(p, 0, partial(receive_first, p)),
    "another order on one stage": lambda p: with_order(p, 1, lambda acts: acts[::-1]),
    "what may be issued at once": lambda p: replace(p, order=(), due=()),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_planted_fault_of_the_order_is_caught(fault: str, chunks: int) -> None:
    plan = PLANTED[fault](in_one_order(unit_plan(3, 6, "1f1b", chunks)))
    with pytest.raises(PlanError, match="would deadlock"):
        play(plan)
    with pytest.raises(PlanError, match="launches are served in order; actor"):
        check_line(plan)


# ---- a device with limits, and what was there before ---------------------------------------------


def by_channel(plan: Plan, actor: Actor) -> str:
    """A communicator for each channel."""
    work = actor.work
    return f"channel {work.channel}" if isinstance(work, TransferWork) else ""


LIMITS = {
    "32 streams": Room(32, WIDE, WIDE),
    "room for 8 kernels": Room(WIDE, WIDE, 8),
    "a GPU": Room(),
}


@pytest.mark.parametrize("room", LIMITS.values(), ids=LIMITS)
def test_ten_chunks_stop_where_each_channel_has_a_communicator(room: Room) -> None:
    plan = unit_plan(2, 4, "1f1b", chunks=10)
    play(plan, Room(WIDE, WIDE, WIDE), by_channel)
    with pytest.raises(PlanError, match="would deadlock"):
        play(plan, room, by_channel)
    play(in_one_order(plan), room)


def test_two_chunks_end_even_so() -> None:
    play(unit_plan(2, 4, "1f1b", chunks=2), Room(), by_channel)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_skipped_play_of_one_order_is_the_whole(layout: Layout) -> None:
    plan = with_axes(layout)
    assert in_one_order(plan) == in_one_order(plan, skip_repeats=False)


@pytest.mark.parametrize("chunks", [1, 2, 12])
def test_no_receive_is_launched_before_the_acts_that_go_before_it(chunks: int) -> None:
    plan = in_one_order(unit_plan(4, 8, "1f1b", chunks))
    for stage in range(4):
        scheduler, issued = Scheduler(plan, stage, 2), []
        while launched := scheduler.next_communication():
            issued.append(plan.actors[launched.actor])
        receives = [actor for actor in issued if actor.kind == RECEIVE]
        assert len(receives) <= (stage > 0), "a stage but the first waits for one micro-batch"


@pytest.mark.parametrize("chunks", [1, 2])
def test_no_receive_of_a_step_is_launched_before_the_compute_of_the_last_has_begun(
    chunks: int,
) -> None:
    """However soon messages come, none waits on the device through what a step ends with."""
    plan = in_one_order(with_axes(Layout(stages=2, chunks=chunks)))
    of_a_step = sum(plan.acts_per_step(a) for a in plan.stage_actors(1) if a.paces)
    scheduler, begun, receives = Scheduler(plan, 1, 3), 0, 0
    while not scheduler.is_finished():
        launched = scheduler.next_communication() or scheduler.next_supply()
        launched = launched or scheduler.next_compute()
        assert launched
        actor = plan.actors[launched.actor]
        if actor.kind == RECEIVE:
            receives += 1
            assert begun >= launched.act // plan.acts_per_step(actor) * of_a_step
        begun += actor.paces
        scheduler.end_act(actor.id)
    assert receives >= 3 * plan.micro_batches


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(data=2, tensor=2)], ids=str)
def test_a_collective_of_a_micro_batch_ends_after_the_compute_that_had_begun(
    layout: Layout,
) -> None:
    plan = replace(with_axes(layout), one_order=True)
    rehearsal = rehearse(plan)
    begun = [e.start for e in rehearsal.first_step if plan.actors[e.actor].paces]
    counts = {
        (e.actor, e.act): sum(start < e.end for start in begun)
        for e in rehearsal.first_step
        if plan.foresees_end(plan.actors[e.actor])
    }
    (((_, order),), (ended,)) = rehearsal.order, rehearsal.ended
    found = dict(zip(order, ended, strict=True))
    assert counts and {act: found[act] for act in counts} == counts
    assert {n for act, n in found.items() if act not in counts} == {0}


@pytest.mark.parametrize("chunks", [1, 2, 12])
def test_communicators_of_a_rank_do_not_grow_with_chunks(chunks: int) -> None:
    plan = unit_plan(4, 8, "1f1b", chunks)
    assert max(len(communicators_of(plan, stage)) for stage in range(4)) == 4


def test_one_call_makes_groups_that_have_no_rank_in_common() -> None:
    rows = [("data", (0, 1)), ("data", (2, 3)), ("tensor", (0, 2)), ("tensor", (1, 3)), ("p", (4,))]
    assert disjoint_calls(rows) == [[*rows[:2], rows[4]], rows[2:4]]
