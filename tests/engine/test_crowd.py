"""Ranks that share the cores of their host, on the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.crowd import Crowd
from flowrun.engine.plan import Plan
from flowrun.engine.rehearsal import rehearse
from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load
from support.tight_plan import tight_plan

GPT = "recipe=gpt_pp model.depth=4 data.max_bytes=100000 eval.batches=0 engine.cache=false"
ONE_STAGE = ("placement.stages=1", "placement.axes={data: 2}", "train.micro_batches=2")
PIPELINE = ("placement.stages=4", "train.micro_batches=8")


def plan_of(*changes: str) -> Plan:
    plan = Job(load([*GPT.split(), *changes]), values=False).training.plan
    return replace(plan, order=(), core=1.0)


def crowd(core: float) -> Crowd:
    """Two stages of a rank each."""
    return Crowd(replace(tight_plan(4, 4), core=core), 2.0**-40)


def test_who_computes_alone_has_a_whole_core() -> None:
    ranks = crowd(core=0.5)
    ranks.begin(0, seconds=4.0, now=0.0)  # as foreseen: on half a core
    assert ranks.ends() == {0: 2.0}
    ranks.begin(1, seconds=4.0, now=1.0)
    assert ranks.ends() == {0: 3.0, 1: 5.0}
    ranks.end(0, now=3.0)
    assert ranks.ends() == {1: 4.0}


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.floats(0.26, 1.0))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_cores_that_are_wanted_are_never_idle(works: list[int], core: float) -> None:
    """Acts of one stage, one after another, beside an endless one of the other."""
    ranks, now = crowd(core), 0.0
    ranks.begin(1, 1e6, now)
    for work in works:
        ranks.begin(0, float(work), now)
        now = ranks.ends()[0]
        ranks.end(0, now)
    assert now == pytest.approx(sum(works), rel=1e-9)


def test_where_all_ranks_compute_all_the_time_nothing_changes() -> None:
    plan = plan_of(*ONE_STAGE)
    assert rehearse(replace(plan, core=0.5)).step_s == pytest.approx(rehearse(plan).step_s, 1e-9)


@pytest.mark.parametrize("core", [0.25, 0.5, 0.75])
def test_a_pipeline_in_a_crowd_takes_between_its_work_and_all_ranks_being_slow(core: float) -> None:
    plan = plan_of(*PIPELINE)
    whole, shared = rehearse(plan), rehearse(replace(plan, core=core))
    assert core * whole.step_s * (1 - 1e-9) <= shared.step_s <= whole.step_s * (1 + 1e-9)
    busy = sum(1 - bubble for bubble in whole.bubble) * whole.step_s * core
    assert shared.step_s >= busy / (core * len(plan.placements)) * (1 - 1e-9)


@pytest.mark.parametrize("core", [0.5, 0.75])
@pytest.mark.parametrize("changes", [PIPELINE, ("placement.stages=2", "train.micro_batches=16")])
def test_what_repeats_is_run_once_there_too(changes: tuple[str, ...], core: float) -> None:
    plan = replace(plan_of(*changes), core=core)
    assert rehearse(plan) == rehearse(plan, shortly=False)
