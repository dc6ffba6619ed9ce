"""`flowrun eval`: the metrics of a run on its held-out samples, without training.

Plain torch computes them on one process, from what the run computes them from: a batch in one piece
where a step's loss is that of its whole batch; else each micro-batch (train.loss_mean=micro_batch),
and in the mirrored view each rank's samples of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from flowrun.engine.capture.capture import Batch, Task, result_names
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.names import ROWS
from flowrun.engine.passes.mirrored_view import rows_by_rank
from flowrun.engine.runtime.rank.rank import Results
from flowrun.launcher.commands.load_run import load_run
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.materials import make_task, with_steps
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.store.run_files import RECIPE


@dataclass(frozen=True)
class Evaluation:
    """The results of the weights after `step` steps; samples: that were read, each counted once.
    notes: what a reader should know of them.
    """

    step: int
    samples: int
    results: Results
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = ", ".join(f"{name} {value:.4f}" for name, value in self.results.items())
        return f"step {self.step}: {found} ({self.samples} held-out samples)"


def evaluate(
    run_folder: Path,
    overrides: list[str] | None = None,
    *,
    step: int | None = None,
    best: bool = False,
    config_dir: str | None = None,
) -> Evaluation:
    """Evaluate a run.

    overrides: of its recipe, such as eval.batches or data.path.  step, best: which weights; without
    them the newest.  Raises RecipeError where no samples are held out.
    """
    threads = torch.get_num_threads()
    run = load_run(run_folder, step, best, overrides or [], config_dir, averages=True)
    recipe = with_steps(run.recipe)
    job = Job(recipe, values=False)
    torch.set_num_threads(threads)  # a job is for ranks, which share the cores
    sampler = job.materials.evaluation_sampler
    if not job.eval_steps:
        raise RecipeError(
            "eval.batches" if not recipe.eval.batches else "eval.fraction",
            "no samples are held out, so there is nothing to evaluate on.",
            "Write eval.batches=8 eval.fraction=0.05: the last samples of the data set.",
        )
    task = make_task(recipe, run.model, job.materials.example)
    _check_loss(task)
    whole = job.plans.step_results()
    batches = range(job.eval_steps)
    results = [_batch_results(job, task, _micro_batches(job, k), whole) for k in batches]
    before = load([f"recipe={run_folder / RECIPE}"])
    return Evaluation(
        run.step,
        sampler.eval_samples(job.eval_steps),
        job.validation(results),
        (*_note_trained(before, recipe), *_note_buffers(job), *sampler.notes(job.eval_steps)),
    )


def _micro_batches(job: Job, number: int) -> list[Batch]:
    """Return evaluation batch `number` in micro-batches."""
    sampler, rows = job.materials.evaluation_sampler, slice(0, job.recipe.micro_batch_size)
    return [sampler(number, part, rows) for part in range(job.recipe.train.micro_batches)]


def _batch_results(job: Job, task: Task, parts: Sequence[Batch], whole: Collection[str]) -> Results:
    """Compute the loss and the metrics of a batch as the run does.

    task: its model has the weights.  parts: micro-batches.  whole: results that are those of the
    batch in one piece; all others are means over micro-batches, and over ranks in the mirrored
    view.
    """
    pieces = [piece for part in parts for piece in rows_by_rank(part, job.strategy)]
    found = [_results(task, piece) for piece in pieces]
    out: Results = {
        name: [row for each in found for row in each[name]]
        if name.startswith(ROWS)
        else sum(each[name] for each in found) / len(found)
        for name in found[0]
    }
    if whole:
        batch = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        of_batch = _results(task, batch)
        out.update({name: of_batch[name] for name in whole})
    return out


def _check_loss(task: Task) -> None:
    if isinstance(task.loss, nn.Module) and task.loss.state_dict():
        raise RecipeError(
            "task.loss",
            f"{type(task.loss).__name__} has weights of its own, which are not read here.",
            "flowrun resume evaluates with them: eval.every=N.",
        )


def _note_trained(before: Recipe, now: Recipe) -> Iterator[str]:
    """Say that training read some of the samples, if it held out others."""
    kept = before.eval.fraction if before.eval.batches else 0.0
    if before.data == now.data and now.eval.fraction > kept:
        yield f"the run trained on some of these samples: it held out {kept:.0%} of them"


def _note_buffers(job: Job) -> Iterator[str]:
    """Say whose buffers were read, where each rank has its own."""
    model = job.materials.model
    named = {name for name, _ in model.named_buffers()} & {*model.state_dict()}
    if named and job.strategy.mirrored and job.recipe.num_ranks > 1:
        yield (
            f"in the mirrored view each rank has buffers of its own ({min(named)}); these are the "
            "numbers with rank 0's, and the run's own are means over ranks, each with its own"
        )


@torch.no_grad()
def _results(task: Task, batch: Batch) -> Results:
    """Compute the loss and the metrics of what the model computes at once."""
    with task.precision():
        output = task.output(batch)
        loss = task.loss_of(output, batch)
        metrics = dict(task.metrics)
        found = [metric(output, batch).tolist() for metric in metrics.values()]
    return {"loss": float(loss), **dict(zip(result_names(metrics), found, strict=True))}
