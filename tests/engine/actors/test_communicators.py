"""Communicators of shipped recipes: few for a rank, made in few calls."""

import pytest

from flowrun.engine.actors.communicators import communicators_of, disjoint_calls, groups_of
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

MANY_CHUNKS = (
    *("placement.stages=4", "placement.chunks=6", "placement.axes.tensor=2", "model.depth=24"),
    *("model.width=16", "model.heads=2", "train.batch_size=8", "train.micro_batches=8"),
)


@pytest.mark.parametrize(
    ("keys", "most", "calls"),
    [
        (("gpt_hybrid", "hardware=h100"), 6, 8),
        (("gpt_hybrid", "hardware=h100", *MANY_CHUNKS), 8, 16),
        pytest.param(("gpt3_175b",), 10, 64, marks=pytest.mark.thorough),  # 26 s
    ],
    ids=["gpt_hybrid", "4 stages, 6 chunks", "gpt3_175b"],
)
def test_a_rank_of_a_shipped_recipe_has_few_communicators(
    keys: tuple[str, ...], most: int, calls: int
) -> None:
    plan = Job(load([f"recipe={keys[0]}", *keys[1:]]), values=False).training.plan
    for_all = 1
    each = [for_all + len(communicators_of(plan, k)) for k in range(len(plan.placements))]
    assert max(each) <= most, each
    named = [(name, ranks) for name, groups in groups_of(plan).items() for ranks in groups]
    assert len(disjoint_calls(named)) <= calls
