"""calibrate, of recipes: what their ops take on this machine, each with its shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console
from rich.table import Table

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.runtime.calibration.calibrated import digits
from flowrun.engine.runtime.calibration.calibration import measure_alone
from flowrun.engine.runtime.calibration.op_times import TimeRatios, measure_op_times
from flowrun.launcher.job.forked import run_in_forks
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.recipe import Recipe

_BESIDE = 2  # processes that measure at once, as ranks compute at the same time
STEPS = 8
ROUNDS = 3  # of all recipes in turn: what others share is slower in one minute than another


def with_ops(
    hardware: Hardware, recipes: Sequence[Recipe], steps: int = STEPS, rounds: int = ROUNDS
) -> Hardware:
    """Add to the profile `hardware` the times of the ops of some recipes.

    recipes: each trains for `steps` steps in each of `rounds` rounds.  Times of other shapes stay.
    """
    jobs, plain = [Job(recipe) for recipe in recipes], replace(hardware, ops={})
    times: TimeRatios = defaultdict(list)
    for _ in range(rounds):
        for job in jobs:
            for key, factors in _measure_job(job, plain, steps).items():
                times[key] += factors
    known = {target: dict(each) for target, each in hardware.ops.items()}
    for (target, shapes), factors in times.items():
        known.setdefault(target, {})[shapes] = digits(median(factors))
    return replace(hardware, ops=known)


def _measure_job(job: Job, hardware: Hardware, steps: int) -> TimeRatios:
    """Measure the ops of a job in all processes."""
    plan = job.training.plan  # made before the processes fork

    def measure() -> TimeRatios:
        measure_alone()
        made = job.materials
        return measure_op_times(plan, made.sampler, made.initial, hardware, steps)

    found: TimeRatios = defaultdict(list)
    for each in run_in_forks([measure] * _BESIDE):
        for key, factors in each.items():
            found[key] += factors
    return found


def show_ops(hardware: Hardware, console: Console) -> None:
    """A line an op: how many shapes were timed, and how far off the rest of the profile is."""
    table = Table("op", "shapes", "measured / foreseen without", box=None)
    for target, known in sorted(hardware.ops.items()):
        least, most = min(known.values()), max(known.values())
        table.add_row(target, str(len(known)), f"{least:.2f} to {most:.2f}")
    console.print(table)
