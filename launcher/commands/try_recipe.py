"""Plan a recipe and train one step of it, for flowrun init."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from flowrun.engine.errors import FlowrunError, RunError
from flowrun.launcher.commands.plan_recipe import plan
from flowrun.launcher.job.forked import run_autograd
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.report.report import Report
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.units import seconds

_MOST_S = 60.0  # of a step that is tried


def try_recipe(file: Path, run: Callable[[Recipe, Path], Report], words: Sequence[str] = ()) -> str:
    """Train one step of a recipe, and return what was foreseen and its loss.

    run: trains into a folder, which is removed.  words: changes of the recipe.  Raises
    FlowrunError; no RunError, as the recipe is wrong, not a run.
    """
    recipe = load([f"recipe={file}", "train.steps=1", "eval.batches=1", *words])
    foreseen_s = run_autograd(lambda: plan(recipe).training.rehearsal.step_s)
    foreseen = f"tried: a step is foreseen to take {seconds(foreseen_s)}"
    if foreseen_s > _MOST_S:
        return f"{foreseen}; none was trained, as that is more than {_MOST_S:g} s"
    doing.doing("training a step")
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = run(recipe, Path(folder) / "run")
    except RunError as error:
        raise FlowrunError(error.where, error.problem, error.instead) from error
    return f"{foreseen}; the loss of the first is {report.first_loss:.4f}"
