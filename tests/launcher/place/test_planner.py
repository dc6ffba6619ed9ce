import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.job.job import Job
from flowrun.launcher.job.recipe_strategy import strategy_of
from flowrun.launcher.place.bound import fill_pipeline
from flowrun.launcher.place.placement_search import search
from flowrun.launcher.place.planner import Planner
from flowrun.launcher.place.repeated_blocks import Captures
from flowrun.launcher.place.space import Branch, Candidate
from flowrun.launcher.recipe.compose import load
from support.plans.placements import SMALL


class Once(Planner):
    """Plans each candidate once, whoever asks."""

    plan = cache(Planner.plan)  # type: ignore[assignment]


def test_the_search_finds_what_looking_at_everything_finds() -> None:
    """And a bound is never above what is rehearsed.  Bounds know no communication: the less it
    takes, the more they leave out.
    """
    job = Job(load([*SMALL, "hardware.act_s=5e-6"]), values=False)
    planner = Once(Captures(job), job.recipe.placed_ranks)
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


MEASURED = "++hardware.ops.timed.fp32=1.5"
ZEROED = ["zero.stage=1", "zero.axis=tensor", "optim.betas=[0.8, 0.9]"]


@pytest.mark.parametrize("keys", [[MEASURED], ZEROED], ids=["measured", "ZeRO"])
def test_a_candidate_is_asked_for_as_its_recipe_would_be(keys: list[str]) -> None:
    """Though no recipe is composed for it; and all candidates share one table of measured ops."""
    planner = Planner.of(load([*SMALL, *keys]))
    assert planner.keys_of(Candidate(Branch((), 1, 1)))
    leaves = [leaf for branch in planner.space.branches() for leaf in planner.space.leaves(branch)]
    some = [*leaves[:: max(1, len(leaves) // 8)], *planner.space.smaller(leaves[-1])]
    for candidate in some:
        composed = strategy_of(planner.recipe_of(candidate))
        found = planner.strategy_of(candidate)
        assert replace(found, preparation=(), unprepared=(), sample_s=0.0) == composed
    assert len({id(planner.strategy_of(candidate).hardware.ops) for candidate in some}) == 1


def test_axes_are_nested_as_the_space_has_them() -> None:
    """Data outermost: ranks of tensor are neighbours, also where the recipe names them alone."""
    planner = Planner.of(load([*SMALL, "auto.ranks=4"]))
    branch = next(b for b in planner.space.branches() if dict(b.axes) == {"data": 2, "tensor": 2})
    recipe = planner.recipe_of(Candidate(branch))
    assert recipe.axes == tuple(name for name, _ in branch.axes) == ("data", "tensor")
    assert planner.strategy_of(Candidate(branch)).placements == recipe.placements


def test_recomputation_that_stays_stays_whole() -> None:
    keys = ["auto.keep=[recompute]", "recompute.modules=[blocks.*]", "recompute.keep=[matmul]"]
    planner = Planner.of(load([*SMALL, *keys]))
    branch = next(planner.space.branches())
    for candidate in planner.space.leaves(branch):
        assert planner.recipe_of(candidate).recompute.keep == ("matmul",)


@pytest.mark.thorough
def test_what_candidates_share_is_what_each_would_have_alone() -> None:
    """Stages, layouts and boxed graphs, whatever was asked for before."""
    planner = Planner.of(load(SMALL))
    branch = next(b for b in planner.space.branches() if b.stages == 2 and b.micro_batches == 4)
    for zero, in_flight in itertools.product((0, 1), ("auto", "gpipe", "1f1b")):
        candidate = Candidate(branch, in_flight, zero)
        shared = planner.plan(candidate)
        alone = Planner(planner.captures, planner.ranks).plan(candidate)
        assert shared == alone


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_bounds_are_of_the_ranks_that_are_placed(ranks: int) -> None:
    """A rank has a smaller share of a host's cores the more of them there are: those that the
    recipe itself would have do not count.
    """
    planner = Planner.of(load([*SMALL, f"auto.ranks={ranks}"]))
    candidate = Candidate(next(planner.space.branches()))
    assert planner.alone.hardware == planner.strategy_of(candidate).hardware


@given(
    stages=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    forward=st.floats(0.05, 0.95),
    micro_batches=st.integers(1, 200),
)
def test_no_cut_fills_a_pipeline_in_less(
    stages: list[float], forward: float, micro_batches: int
) -> None:
    """Each stage begins when the first micro-batch has come through those before it."""
    begins = itertools.accumulate((forward * each for each in stages), initial=0.0)
    ends = (at + micro_batches * each for at, each in zip(begins, stages, strict=False))
    least = fill_pipeline(micro_batches * sum(stages), forward, len(stages), micro_batches)
    assert least <= max(ends) * (1 + 1e-9)
    assert least >= micro_batches * sum(stages) / len(stages) * (1 - 1e-9)


def test_a_pipeline_is_filled_in_least_time_by_stages_that_grow_shorter() -> None:
    stages = [1.0, 0.75, 0.5625]  # 2 micro-batches, half of the work in forward
    assert fill_pipeline(2 * sum(stages), 0.5, 3, 2) == pytest.approx(2.0)
