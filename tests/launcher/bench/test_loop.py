from __future__ import annotations

import pytest
import torch

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND
from flowrun.launcher.bench.loop import EmptyRank, loop_times
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load


@pytest.mark.parametrize(
    ("recipe", "kinds"), [("mlp_hybrid", {BOX}), ("mlp_pipeline", {SEND, RECEIVE})]
)
def test_an_empty_rank_does_every_act_of_its_plan(recipe: str, kinds: set[str]) -> None:
    job = Job(load([f"recipe={recipe}", "train.micro_batches=2"]))
    plan = job.training.plan
    rank = EmptyRank(job, plan, rank=0)
    before = {name: value.clone() for name, value in rank.body.variables.items()}
    made = rank.run(3)
    rank.links.close()
    assert [each["loss"] for each in made] == ([0.0] * 3 if rank.reports else [])
    actors = plan.stage_actors(0)
    assert kinds <= {actor.kind for actor in actors}
    assert rank.body.acts == {actor.id: 3 * plan.acts_per_step(actor) for actor in actors}
    assert all(torch.equal(value, before[name]) for name, value in rank.body.variables.items())


def test_every_stage_is_timed() -> None:
    job = Job(load(["recipe=mlp_pipeline"]))
    plan = job.training.plan
    found = list(loop_times(job))
    assert [time.stage for time in found] == list(range(len(plan.placements)))
    assert sum(time.acts for time in found) == sum(map(plan.acts_per_step, plan.actors))
    assert all(time.act_s > 0 for time in found)
