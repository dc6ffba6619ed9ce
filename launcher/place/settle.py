"""A recipe as it will run, placed by a search if it asks for that; and the rest of a run, on fewer
ranks or on the hosts that are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]

from flowrun.engine.errors import FlowrunError, RunError
from flowrun.engine.ir.placement import BATCH_AXES
from flowrun.launcher.job.compiling import Compiled, compile_job
from flowrun.launcher.job.forked import run_autograd
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.job.resumed import put_at
from flowrun.launcher.recipe.compose import change
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.report.notes import notes
from flowrun.launcher.report.record import Record
from flowrun.launcher.store.checkpoint import Checkpoint

if TYPE_CHECKING:
    from flowrun.launcher.place.place import Placed

_REASONS = 5  # layouts whose refusal is shown; there may be many


def settle(recipe: Recipe) -> tuple[Recipe, Placed | None]:
    """Return the recipe as it will run, and how it was placed if it asks for that."""
    if not recipe.auto.placement:
        return recipe, None
    from flowrun.launcher.place.place import place  # takes 0.4 s

    placed = run_autograd(lambda: place(recipe))
    return placed.recipe, placed


def job_to_plan(recipe: Recipe) -> tuple[Job, Placed | None]:
    """Make the job of a recipe of any size that is only planned, here and in every suite; with what
    a search has placed.  Raises RecipeError.
    """
    recipe, placed = settle(with_steps(recipe))
    return Job(recipe, values=False, planned=placed.training if placed else None), placed


class Replan:
    """Plans for other ranks than a run began with; what is written then is of the new layout."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._jobs = {record.job.recipe.launch.num_hosts: record.job}

    def for_fewer_ranks(self, lost: RunError) -> Compiled:
        """Plan for fewer ranks (launch.min_ranks).  lost: why; it is raised where none is found."""
        record, before = self._record, self._record.job.recipe
        start = record.checkpoints[-1] if record.checkpoints else None
        layouts = layouts_on_fewer(before, before.launch.min_ranks or before.num_ranks)
        job, layout = _plan_first(before, layouts, start, lost)
        record.go_on_with(job, lost, layout)
        record.write_plan(job.training, notes(job))
        return compile_job(job, record.say)

    def for_hosts(self, num_hosts: int, start: Start | None) -> Compiled:
        """Plan for a number of hosts.  start: the state that all of them begin at."""
        record, asked, job = self._record, self._record.asked, self._jobs.get(num_hosts)
        assert start is None or isinstance(start, Checkpoint)
        if is_new := job is None:
            ranks = asked.num_ranks // asked.launch.num_hosts * num_hosts
            endpoint = "" if num_hosts == 1 else asked.launch.rdzv_endpoint  # maybe a platform's
            fixed = (f"launch.nnodes={num_hosts}", f"launch.rdzv_endpoint='{endpoint}'")
            layouts = ((*fixed, *keys) for keys in layouts_on(asked, ranks))
            record.say(f"planning for {num_hosts} of {asked.launch.num_hosts} hosts, {ranks} ranks")
            unplanned = RunError(
                "launch.nnodes", f"no layout was found on the {ranks} ranks of {num_hosts}."
            )
            job, _ = _plan_first(asked, layouts, start, unplanned)
            self._jobs[num_hosts] = job
        elif start:
            put_at(job, start)
        record.go_on_from(start, job)
        if is_new:
            record.write_plan(job.training, notes(job))
        return compile_job(job, record.say)


def _plan_first(
    asked: Recipe, layouts: Iterable[tuple[str, ...]], start: Checkpoint | None, error: RunError
) -> tuple[Job, str]:
    """Return the job of the first layout that can be planned, and the layout.

    asked: the recipe.  layouts: overrides of it, in the order to try them.  start: where it begins.
    error: is raised where none can be planned, with what is wrong with each.
    """
    refused: list[str] = []
    for overrides in layouts:
        try:
            changed = replace(change(asked, overrides), seat=asked.seat)  # and its notes
            recipe, placed = settle(replace(changed, weights="") if start else changed)
            job = Job(recipe, start, planned=placed.training if placed else None)
            job.plans.compiled  # noqa: B018 - it raises where there is no plan
        except FlowrunError as reason:
            refused.append(f"{', '.join(overrides)}: {reason.where}: {reason.problem}")
            continue
        if start:
            put_at(job, start)
        return job, ", ".join(overrides)
    more = [f"and {len(refused) - _REASONS} more layouts"] if len(refused) > _REASONS else []
    problem = "\n".join((error.problem, *refused[:_REASONS], *more))
    raise RunError(error.where, problem, error.instead) from error


def layouts_on(recipe: Recipe, ranks: int) -> Iterator[tuple[str, ...]]:
    """Yield overrides of the recipe that leave it `ranks` ranks, in the order to try them.

    The axis that divides the batch shrinks, so that every rank keeps its part of the model; where
    that is not possible, auto.placement chooses.  The batch, the learning rate and the samples of a
    step stay.
    """
    yield from _shrunk(recipe, ranks)
    yield _search(ranks)


def layouts_on_fewer(recipe: Recipe, least: int) -> Iterator[tuple[str, ...]]:
    """Yield overrides of the recipe that leave it `least` ranks or more: those of layouts_on, first
    all in which every rank keeps its part of the model.
    """
    fewer = range(recipe.num_ranks - 1, least - 1, -1)
    for ranks in fewer:
        yield from _shrunk(recipe, ranks)
    for ranks in fewer:
        yield _search(ranks)


def _shrunk(recipe: Recipe, ranks: int) -> Iterator[tuple[str, ...]]:
    keys = yaml.safe_load(recipe.to_yaml())["placement"]
    axes, stages = keys["axes"], keys["stages"]
    batch_axis = next((axis for axis in axes if axis in BATCH_AXES), None)
    if batch_axis and isinstance(stages, int):
        others = stages * math.prod(size for axis, size in axes.items() if axis != batch_axis)
        size, left = divmod(ranks, others)
        if size and not left:
            yield (f"placement.axes.{batch_axis}={size}",)


def _search(ranks: int) -> tuple[str, ...]:
    return "auto.placement=true", f"auto.ranks={ranks}"
