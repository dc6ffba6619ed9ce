from collections.abc import Collection
from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import Plan
from flowrun.engine.errors import PlanError
from flowrun.engine.rehearsal.clock import Clock
from flowrun.engine.rehearsal.period import Period
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from support.plans.tight_plan import tight_plan

GPT = "recipe=gpt_pp model.depth=4 data.max_bytes=100000 eval.batches=0 engine.cache=false"


def plan_of(*changes: str) -> Plan:
    job = Job(load([*GPT.split(), *changes]), values=False)
    return replace(job.training.plan, order=())


SOME = (
    ("placement.stages=4", "train.micro_batches=32", "placement.in_flight=1f1b"),
    ("placement.stages=2", "train.micro_batches=32", "placement.axes={tensor: 2}"),
    ("placement.stages=1", "placement.axes={data: 2}", "zero={axis: data, stage: 2}"),
    ("placement={stages: 2, chunks: 2}", "train.micro_batches=16"),
    ("placement={stages: 2, chunks: 2}", "train={micro_batches: 13, batch_size: 13}"),
)
MORE = (
    ("placement.stages=2", "train.micro_batches=16"),
    ("placement.stages=4", "train.micro_batches=32"),
    ("placement.stages=2", "train.micro_batches=16", "recompute.modules=[blocks.*]"),
    ("placement.stages=2", "train.micro_batches=16", "optim.clip_norm=1.0"),
    ("placement={stages: 2, chunks: 2, in_flight: 1f1b}", "train.micro_batches=32"),
    ("placement={stages: 4, chunks: 2}", "train={micro_batches: 64, batch_size: 64}"),
    (
        "placement={stages: 2, chunks: 2}",
        "placement.axes={tensor: 2}",
        "engine.blocking=[tensor]",
        "train.micro_batches=16",
    ),
)


@pytest.mark.parametrize(
    "changes",
    [*SOME, *(pytest.param(changes, marks=pytest.mark.thorough) for changes in MORE)],
    ids=lambda changes: " ".join(changes),
)
def test_the_rehearsal_is_that_of_the_whole_run(changes: tuple[str, ...]) -> None:
    plan = plan_of(*changes)
    whole = rehearse(plan, skip_repeats=False)
    assert rehearse(plan) == whole
    blind = rehearse(plan, count_memory=False)
    assert (blind.step_s, blind.order, blind.bubble) == (whole.step_s, whole.order, whole.bubble)
    assert not blind.peak_bytes


def test_so_it_is_where_micro_batches_hold_views_of_what_a_step_makes_once() -> None:
    """The norms of the classes are made once a step, and expanded for every micro-batch."""
    given = ("placement={axes: {data: 1}, stages: 4, in_flight: 1f1b}", "train.micro_batches=32")
    job = Job(load(["recipe=insightface_hybrid", "engine.cache=false", *given]), values=False)
    plan = replace(job.training.plan, order=())
    assert rehearse(plan) == rehearse(plan, skip_repeats=False)


def test_the_middle_of_a_step_of_many_micro_batches_is_not_run() -> None:
    plan = plan_of("placement.stages=2", "train.micro_batches=32", "train.batch_size=32")
    acts = sum(map(plan.acts_per_step, plan.actors))
    clocks = [Clock(plan, lambda a: a.seconds, steps=1, skip_repeats=s) for s in (True, False)]
    for clock in clocks:
        clock.run()
    short, whole = (clock.state for clock in clocks)
    assert short.num_begun < whole.num_begun / 2
    for clock in clocks:  # batches are read a step ahead: targets are counted
        first = [e for e in clock.state.events if e.act < plan.acts_per_step(plan.actors[e.actor])]
        assert len(first) == acts
    assert len(whole.events) == len(short.events)


def test_a_step_is_not_run_on_from_where_the_one_before_was_alike() -> None:
    plan = plan_of("placement.stages=2", "train.micro_batches=4")
    whole = rehearse(plan, skip_repeats=False)
    plan = replace(plan, order=whole.order)
    clock = Clock(plan, lambda a: a.seconds, steps=4, skip_repeats=True, endless=True)
    clock.run()
    first, second, *_ = clock.state.left
    assert not first
    assert second
    assert clock.step_s == whole.step_s


def test_the_clock_counts_the_actors_that_are_about_to_begin_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of("placement.stages=2", "train.micro_batches=4")

    def look(period: Period, ended: Collection[int], whole: bool) -> bool:
        acts = map(period.state.acts_of, period.state.often)
        done, left = zip(*(divmod(each, plan.micro_batches) for each in acts), strict=True)
        assert (period.state.turned, period.state.at_start) == (sum(done), left.count(0))
        return False

    monkeypatch.setattr(Period, "look", look)
    rehearse(plan)


@pytest.mark.parametrize("micro_batches", [8, 64])
def test_a_plan_that_cannot_end_is_refused_however_long_it_runs(micro_batches: int) -> None:
    with pytest.raises(PlanError, match="would deadlock"):
        rehearse(tight_plan(micro_batches, slots=1))
