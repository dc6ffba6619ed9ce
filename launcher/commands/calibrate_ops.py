"""calibrate, of recipes: what their ops take on this machine, each with its shapes."""

from __future__ import annotations

import pickle
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.runtime.calibration.calibrated import digits
from flowrun.engine.runtime.calibration.op_times import TimeRatios, measure_op_times
from flowrun.engine.runtime.process import heap
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
    from torch.multiprocessing.spawn import start_processes

    assert job.training  # planned before the processes fork
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]
            _rank, (job, hardware, steps, folder), nprocs=_BESIDE, start_method="fork"
        )
        each = [pickle.loads(Path(folder, str(k)).read_bytes()) for k in range(_BESIDE)]
    found: TimeRatios = defaultdict(list)
    for key, factors in (item for one in each for item in one.items()):
        found[key] += factors
    return found


def _rank(rank: int, job: Job, hardware: Hardware, steps: int, folder: str) -> None:
    heap.keep_pages()
    torch.set_num_threads(1)
    found = measure_op_times(
        job.training.plan, job.materials.sampler, job.materials.initial, hardware, steps
    )
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))


def show_ops(hardware: Hardware, console: Console) -> None:
    """A line an op: how many shapes were timed, and how far off the rest of the profile is."""
    table = Table("op", "shapes", "measured / foreseen without", box=None)
    for target, known in sorted(hardware.ops.items()):
        least, most = min(known.values()), max(known.values())
        table.add_row(target, str(len(known)), f"{least:.2f} to {most:.2f}")
    console.print(table)
