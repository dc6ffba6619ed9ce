"""The story: recipe -> logical graph -> plan -> rehearsal -> actors -> report.  A newcomer reads this file first."""

from __future__ import annotations

from pathlib import Path

from flowrun.launcher.elastic import execute_local
from flowrun.launcher.job import Job
from flowrun.launcher.progress import Progress
from flowrun.launcher.record import Record
from flowrun.launcher.report import Report
from flowrun.launcher.schema import Recipe
from flowrun.launcher.virtual import execute_virtual


def run(recipe: Recipe, folder: Path, progress: Progress | None = None) -> Report:
    """Train a recipe; its plan, metrics, weights and report go to `folder`.

    Raises FlowrunError: nothing was started if it is a RecipeError, SbpError or PlanError.
    """
    job = Job(recipe)  # the model, the data and what the recipe asks of the compiler
    training = job.training  # capture, passes, plan, rehearsal (engine/compile.py)
    evaluation = job.evaluation
    record = Record(folder, job, progress)
    record.planned(training)
    execute = execute_virtual if recipe.launch.name == "virtual" else execute_local
    log = execute(job, training, evaluation, record)  # actors act, registers fill, credits return
    report = Report.of(job, training, log)  # what was foreseen beside what was measured
    record.finished(report)
    return report
