from collections import defaultdict
from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND
from flowrun.engine.compile import plan_training
from flowrun.engine.runtime.drivers.recorder import RecordedCluster
from flowrun.engine.trace.trace import (
    TURN,
    Needs,
    TraceEvent,
    What,
    build_slices,
    keep_last_steps,
    replace_with_device_times,
    step_number,
)
from support.layouts.grids import Layout, captured, compiled, initial, strategy
from support.layouts.plain_loop import mlp

STEPS, TRACED = 6, 3
LAYOUTS = [
    Layout(),
    Layout(data=2, zero=3),
    Layout(tensor=2, stages=2),
    Layout(stages=2, in_flight="gpipe"),
    Layout(data=2, stages=2, register_slots=1),
]
TRAINING = mlp(micro_batches=4)


def recorded(layout: Layout, seed: int | None) -> RecordedCluster:
    plan = compiled(TRAINING, layout).plan
    cluster = RecordedCluster(plan, TRAINING.rows, initial(TRAINING), seed, trace=TRACED)
    cluster.run(STEPS)
    return cluster


@pytest.mark.parametrize("seed", [None, 1, 2], ids=lambda seed: f"seed {seed}")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_act_begins_when_all_that_it_needs_has_ended(layout: Layout, seed: int | None) -> None:
    cluster = recorded(layout, seed)
    needs = Needs(cluster.plan)
    for rank, notes in cluster.read_notes().items():
        slices = {(s.actor, s.act): s for s in build_slices(cluster.plan, rank, notes)}
        for s in slices.values():
            for need in needs.of(s.actor, s.act):
                if (other := slices.get(need.of)) is not None:
                    assert (other.begin if need.why == TURN else other.end) <= s.begin, (s, need)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rehearsed_act_begins_with_what_it_waited_for_or_with_the_end_of_another(
    layout: Layout,
) -> None:
    asked = strategy(TRAINING, layout)
    # where targets are counted, the next step is read between the acts of this one
    found = plan_training(captured(TRAINING), replace(asked, counts_step=False))
    notes = defaultdict(list)
    ends = defaultdict(set)
    for e in found.rehearsal.first_step:
        times = round(e.start * 1e12), round(e.end * 1e12)
        notes[e.stage].append(TraceEvent(What.COMPUTE, e.actor, e.act, *times))
        ends[e.stage].add(times[1])
    for stage, own in notes.items():
        for s in build_slices(found.plan, stage, own):
            communicates = found.plan.actors[s.actor].kind in (BOX, SEND, RECEIVE)
            if s.begin and not communicates:  # that may wait for the link or its other end
                assert s.begin == s.ready or s.begin in ends[stage], s


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_act_of_the_last_steps_is_recorded_once(layout: Layout) -> None:
    cluster = recorded(layout, None)
    for rank, notes in cluster.read_notes().items():
        acts = [(s.actor, s.act) for s in build_slices(cluster.plan, rank, notes)]
        assert len(acts) == len(set(acts))
        assert set(acts) == {
            (actor.id, act)
            for actor in cluster.plan.stage_actors(cluster.plan.stage_of(rank))
            for act in range(STEPS * cluster.plan.acts_per_step(actor))
            if step_number(cluster.plan, actor.id, act) >= STEPS - TRACED
        }


def test_a_trace_of_more_steps_than_there_are_is_of_all() -> None:
    plan = compiled(TRAINING, Layout()).plan
    notes = [TraceEvent(What.COMPUTE, plan.actors[-1].id, 0, 5, 6)]
    assert keep_last_steps(plan, notes, 100) == notes


def test_what_a_device_does_behind_its_host_is_told_by_its_own_clock() -> None:
    """The host is done with both acts before the device begins with the first."""
    notes = [
        TraceEvent(What.RUN, 0, 0, 0, 100),
        TraceEvent(What.ISSUE, 7, 0, 1, 3),
        TraceEvent(What.COMPUTE, 1, 0, 4, 6),
        TraceEvent(What.COMPUTE, 2, 0, 6, 8),
        TraceEvent(What.SLEEP, 7, 0, 8, 30),
        TraceEvent(What.FLIGHT, 7, 0, 30, 30),
        TraceEvent(What.TAKE, 7, 0, 31, 34),
    ]
    times = {(2, 0): (50, 90), (1, 0): (10, 40)}
    assert replace_with_device_times(notes, times) == [
        TraceEvent(What.RUN, 0, 0, 0, 100),
        TraceEvent(What.ISSUE, 7, 0, 1, 1),
        TraceEvent(What.FLIGHT, 7, 0, 30, 30),
        TraceEvent(What.TAKE, 7, 0, 34, 34),
        TraceEvent(What.SLEEP, 2, 0, 40, 50),
        TraceEvent(What.COMPUTE, 1, 0, 10, 40),
        TraceEvent(What.COMPUTE, 2, 0, 50, 90),
    ]
