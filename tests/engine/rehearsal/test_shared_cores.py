import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.actors.plan import BOX, Actor, BoxWork, Plan, TransferWork
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.graph import FORWARD, LogicalGraph
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, P
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.rehearsal.shared_cores import SharedCores
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from support.plans.tight_plan import MAKE, USE, tight_plan

GPT = "recipe=gpt_pp model.depth=4 data.max_bytes=100000 eval.batches=0 engine.cache=false"
ONE_STAGE = ("placement.stages=1", "placement.axes={data: 2}", "train.micro_batches=2")
PIPELINE = ("placement.stages=4", "train.micro_batches=8")


@cache
def plan_of(*changes: str) -> Plan:
    plan = Job(load([*GPT.split(), *changes]), values=False).training.plan
    return replace(plan, order=(), core=1.0, cores=math.inf)


def crowd(core: float) -> SharedCores:
    """Two stages of a rank each."""
    return SharedCores(replace(tight_plan(4, 4), core=core), 2.0**-40)


def test_who_computes_alone_has_a_whole_core() -> None:
    ranks = crowd(core=0.5)
    ranks.begin(MAKE, seconds=4.0, now=0.0)  # as foreseen: on half a core
    assert ranks.ends() == {MAKE: 2.0}
    ranks.begin(USE, seconds=4.0, now=1.0)
    assert ranks.ends() == {MAKE: 3.0, USE: 5.0}
    ranks.end(MAKE, now=3.0)
    assert ranks.ends() == {USE: 4.0}


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.floats(0.26, 1.0))
@settings(max_examples=100)
def test_cores_that_are_wanted_are_never_idle(works: list[int], core: float) -> None:
    """Acts of one stage, one after another, beside an endless one of the other."""
    ranks, now = crowd(core), 0.0
    ranks.begin(USE, 1e6, now)
    for work in works:
        ranks.begin(MAKE, float(work), now)
        now = ranks.ends()[MAKE]
        ranks.end(MAKE, now)
    assert now == pytest.approx(sum(works), rel=1e-9)


def test_where_all_ranks_compute_all_the_time_nothing_changes() -> None:
    plan = reading(0.0, math.inf, *ONE_STAGE)
    assert rehearse(replace(plan, core=0.5)).step_s == pytest.approx(rehearse(plan).step_s, 1e-9)


@pytest.mark.parametrize("core", [0.25, 0.5, 0.75])
def test_a_pipeline_in_a_crowd_takes_between_its_work_and_all_ranks_being_slow(core: float) -> None:
    plan = plan_of(*PIPELINE)
    whole, shared = rehearse(plan), rehearse(replace(plan, core=core))
    assert core * whole.step_s * (1 - 1e-9) <= shared.step_s <= whole.step_s * (1 + 1e-9)
    busy = sum(1 - bubble for bubble in whole.bubble) * whole.step_s * core
    assert shared.step_s >= busy / (core * len(plan.placements)) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("axes", "room"),
    [({"data": 2, "tensor": 2}, True), ({"data": 4}, False), ({"data": 2}, True)],
    ids=["a pair of four", "all four", "two"],
)
def test_a_boxing_has_room_where_its_group_has_a_core_each(
    axes: dict[str, int], room: bool
) -> None:
    """On two cores; the other groups of the stage are in acts of their own."""
    ranks = math.prod(axes.values())
    box = Actor(
        0, "box", BOX, 0, phase=FORWARD, per_step=False, work=BoxWork((BoxingStep(0, P, B),), ())
    )
    placement = Placement(tuple(axes.items()), tuple(range(ranks)))
    plan = Plan(
        placements=(placement,),
        axes=tuple(axes),
        graph=LogicalGraph((), {}),
        actors=(box,),
        registers=(),
        micro_batches=1,
    )
    assert SharedCores(replace(plan, core=2 / ranks), 2.0**-40).has_room(0) is room


def crowded(plan: Plan, waits: float, otherwise: float) -> Plan:
    """Messages take so many seconds, of which they wait some only where others have the cores."""
    return replace(
        plan,
        actors=tuple(
            replace(a, seconds=waits + otherwise, crowding_s=waits)
            if isinstance(a.work, TransferWork)
            else a
            for a in plan.actors
        ),
    )


def test_a_message_waits_for_a_core_only_where_none_is_free() -> None:
    """Four ranks in a row, of which one computes at a time and two talk: with two cores it finds
    them free, but where a gradient of weights is on one; with one core it never does.
    """
    plan = plan_of("placement.stages=4", "train.micro_batches=1")
    never, always = crowded(plan, 0.0, 1e-3), crowded(plan, 0.0, 4e-3)
    some = crowded(plan, 3e-3, 1e-3)
    least, found, most = (rehearse(replace(p, core=0.5)).step_s for p in (never, some, always))
    assert least <= found < least + 0.5 * (most - least)
    assert rehearse(replace(some, core=0.25)) == rehearse(replace(always, core=0.25))


@pytest.mark.parametrize("waits", [0.0, 3e-3])
@pytest.mark.parametrize("core", [0.5, 0.75])
@pytest.mark.parametrize("changes", [PIPELINE, ("placement.stages=2", "train.micro_batches=16")])
def test_what_repeats_is_run_once_there_too(
    changes: tuple[str, ...], core: float, waits: float
) -> None:
    plan = crowded(replace(plan_of(*changes), core=core), waits, 1e-3)
    assert rehearse(plan) == rehearse(plan, skip_repeats=False)


def reading(seconds: float, cores: float, *changes: str) -> Plan:
    """Of every batch so many seconds on one core."""
    plan = plan_of(*changes)
    actors = (replace(a, seconds=seconds) if a.runs_in_thread else a for a in plan.actors)
    return replace(plan, actors=tuple(actors), cores=cores)


def busy_of(plan: Plan) -> float:
    """Core seconds of a step on all ranks, but for communication."""
    return sum(
        actor.seconds * plan.acts_per_step(actor) * len(plan.placements[actor.stage].ranks)
        for actor in plan.actors
        if actor.computes or actor.runs_in_thread
    )


def test_what_makes_batches_ready_takes_from_cores_that_all_compute_on() -> None:
    """Ranks of one stage alone compute nearly all the time: so reading makes their step longer."""
    none, some = (rehearse(reading(s, 1.0, *ONE_STAGE)).step_s for s in (0.0, 1e-3))
    assert some - none == pytest.approx(2 * 1e-3, rel=0.2)  # two micro-batches; some of it waits


@pytest.mark.parametrize("changes", [ONE_STAGE, PIPELINE])
def test_with_a_core_for_each_nothing_waits(changes: tuple[str, ...]) -> None:
    wanted = 1.0 + sum(a.runs_in_thread for a in reading(1e-3, 1.0, *changes).stage_actors(0))
    enough, endless = (rehearse(reading(1e-3, c, *changes)) for c in (wanted, math.inf))
    assert enough == endless


@pytest.mark.parametrize("cores", [1.0, 1.5])
@pytest.mark.parametrize("changes", [ONE_STAGE, PIPELINE])
def test_cores_are_not_more_than_there_are(changes: tuple[str, ...], cores: float) -> None:
    plan = reading(5e-3, cores, *changes)
    found = rehearse(plan)
    assert found.step_s >= busy_of(plan) / (cores * plan.num_ranks) * (1 - 1e-9)
    assert found == rehearse(plan, skip_repeats=False)
