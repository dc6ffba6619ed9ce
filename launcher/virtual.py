"""launch=virtual: all ranks of the plan in this process."""

from __future__ import annotations

import time

import torch

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.virtual import VirtualCluster
from flowrun.launcher import weights
from flowrun.launcher.failure import described
from flowrun.launcher.job import Job
from flowrun.launcher.record import Record
from flowrun.launcher.report import Log


def execute_virtual(
    job: Job, training: Rehearsed, evaluation: Rehearsed | None, record: Record
) -> Log:
    """Train, then evaluate, on the virtual cluster."""
    recipe = job.recipe
    torch.set_num_threads(recipe.launch.threads)
    seed = recipe.launch.message_order_seed
    cluster = VirtualCluster(training.plan, job.sampler, job.initial, seed)
    before = time.perf_counter()

    def on_step(step: int, results: dict[str, float]) -> None:
        nonlocal before
        now = time.perf_counter()
        record.step(step, results, now - before)
        before = now

    try:
        cluster.run(recipe.train.steps, on_step)
    except BaseException as error:
        record.close()
        if isinstance(error, RunError):
            where, problem, _ = described(error)
            raise RunError(where, problem) from error
        raise
    trained = {v.name: cluster.value(v.name) for v in weights.saved(training.plan)}
    if recipe.train.save:
        weights.save(record.folder, trained)
    if recipe.optim.ema_eval:
        trained.update({name: trained.get(f"ema/{name}", value) for name, value in trained.items()})
    sent: dict[int, int] = {}
    for actor, count in cluster.sent_bytes.items():
        first = training.plan.placements[training.plan.actors[actor].stage].ranks[0]
        sent[first] = sent.get(first, 0) + count
    return Log(
        tuple(record.steps),
        _evaluate(job, evaluation, trained),
        {},
        sent,
        {rank: acts_by_name(training, body.acts) for rank, body in cluster.ranks.items()},
        {rank: most_stashed(training, body.most_live) for rank, body in cluster.ranks.items()},
    )


def _evaluate(
    job: Job, evaluation: Rehearsed | None, trained: dict[str, torch.Tensor]
) -> dict[str, float]:
    steps = job.evaluation_sampler.eval_steps(job.recipe.eval.batches)
    if evaluation is None or not steps:
        return {}
    cluster = VirtualCluster(evaluation.plan, job.evaluation_sampler, {**job.initial, **trained})
    return job.validation(cluster.run(steps))


def acts_by_name(rehearsed: Rehearsed, acts: dict[int, int]) -> dict[str, int]:
    """Actor name -> acts."""
    return {rehearsed.plan.actors[actor].name: count for actor, count in acts.items()}


def most_stashed(rehearsed: Rehearsed, most_live: dict[int, int]) -> int:
    """Most versions of any stash register that were live at once."""
    registers = rehearsed.plan.registers
    return max((count for r, count in most_live.items() if registers[r].stash), default=0)
