"""`flowrun eval`: the metrics of a run on its held-out samples, without training.

Plain torch computes them on one process, a batch in one piece, as a step's loss is that of its
whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task
from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.rank.rank import Results
from flowrun.launcher.commands.load_run import load_run
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.job.recipe_strategy import AUTOCAST
from flowrun.launcher.model.build import loss_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.store.checkpoint import RECIPE


@dataclass(frozen=True)
class Evaluation:
    """The results of the weights after `step` steps; samples: that were read.  note: what a reader
    should know of them, or empty.
    """

    step: int
    samples: int
    results: Results
    note: str = ""

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

    run_folder: of the run.  overrides: of its recipe, such as eval.batches or data.path.  step,
    best: which weights; without them the newest.  config_dir: the user's own groups.  Raises
    RecipeError where no samples are held out.
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
    _check_loss(job.materials.task)
    results, train = [], recipe.train
    rows = slice(0, recipe.micro_batch_size)
    for number in range(job.eval_steps):
        parts = [sampler(number, part, rows) for part in range(train.micro_batches)]
        batch = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        results.append(_results(recipe, job.materials.task, run.model, batch))
    samples = job.eval_steps * train.batch_size
    note = _note(load([f"recipe={run_folder / RECIPE}"]), recipe)
    return Evaluation(run.step, samples, job.validation(results), note)


def _check_loss(task: Task) -> None:
    if isinstance(task.loss, nn.Module) and task.loss.state_dict():
        raise RecipeError(
            "task.loss",
            f"{type(task.loss).__name__} has weights of its own, which are not read here.",
            "flowrun resume evaluates with them: eval.every=N.",
        )


def _note(before: Recipe, now: Recipe) -> str:
    """Say that training read some of the samples, if it held out others."""
    kept = before.eval.fraction if before.eval.batches else 0.0
    if before.data != now.data or now.eval.fraction <= kept:
        return ""
    return f"the run trained on some of these samples: it held out {kept:.0%} of them"


@torch.no_grad()
def _results(recipe: Recipe, task: Task, model: nn.Module, batch: Mapping[str, Tensor]) -> Results:
    """Compute the loss and the metrics of a batch."""
    dtype = AUTOCAST[recipe.precision.dtype]
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = model(**{argument: batch[name] for argument, name in task.inputs.items()})
        loss = loss_of(task.loss, output, batch)
        metrics = {name: metric(output, batch) for name, metric in dict(task.metrics).items()}
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}
