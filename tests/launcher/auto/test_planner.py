"""Bounds, plans and the search on real plans, against looking at everything."""

from __future__ import annotations

from functools import cache

import pytest

from flowrun.launcher.auto.planner import Planner
from flowrun.launcher.auto.search import search
from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load
from support.placements import SMALL


class Once(Planner):
    """Plans each candidate once, whoever asks."""

    plan = cache(Planner.plan)  # type: ignore[assignment]


def test_the_search_finds_what_looking_at_everything_finds() -> None:
    """And a bound is never above what is rehearsed."""
    planner = Once(Job(load(SMALL), values=False))
    found = search(planner, 0, 1000)
    few = search(planner, 0, 1000, shown=1)
    every = []
    for branch, whole in planner.branches():
        for candidate, bound in planner.open(branch):
            outcome = planner.plan(candidate)
            assert not outcome.problem
            assert whole.seconds <= bound.seconds <= outcome.step_s, candidate
            assert whole.bytes <= bound.bytes <= outcome.bytes, candidate
            spent = outcome.spent
            parts = spent.work + spent.repeated + spent.bytes + spent.bubble
            assert parts == pytest.approx(outcome.step_s)
            every.append(outcome)
    times = sorted(outcome.step_s for outcome in every)
    assert [outcome.step_s for outcome in found.outcomes[:10]] == times[:10]
    assert few.outcomes[0].step_s == times[0]
    assert len(few.outcomes) < len(every) and few.left
