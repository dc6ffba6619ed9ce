"""The story: recipe -> logical graph -> plan -> rehearsal -> actors -> report.  A newcomer reads
this file first.

The placement search and `verify` are imported where they are called, as that takes 0.4 s.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import FlowrunError, RunError
from flowrun.launcher.job.compiling import check_runs, kernels_of
from flowrun.launcher.job.forked import run_in_fork
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.launch.failure import compiling
from flowrun.launcher.launch.hosts.alone import HostsChanged
from flowrun.launcher.launch.hosts.hosts import open_hosts
from flowrun.launcher.launch.hosts.meeting import ranks_of_a_host
from flowrun.launcher.launch.limits import check_limits
from flowrun.launcher.launch.local_launch import AlreadyComplete, LocalRun
from flowrun.launcher.launch.preemption import Preempted, Requests
from flowrun.launcher.launch.restart.restarts import RanksLost
from flowrun.launcher.launch.virtual_launch import execute_virtual
from flowrun.launcher.launch.watch import find_limit
from flowrun.launcher.listeners.make import make_listeners
from flowrun.launcher.recipe.compose import change
from flowrun.launcher.recipe.device import forks_autograd
from flowrun.launcher.recipe.fewer_ranks import layouts_on, layouts_on_fewer
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import AUTO, nodes_of
from flowrun.launcher.report import trace_file as trace
from flowrun.launcher.report.notes import notes
from flowrun.launcher.report.progress import Progress
from flowrun.launcher.report.record import FAILED, PREEMPTED, STOPPED, Record
from flowrun.launcher.report.report import Log, Report, read_complete
from flowrun.launcher.report.show_plan import plan_report
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import Checkpoint, alone, find_all, find_step, prepare
from flowrun.launcher.terminal.console import output_width

if TYPE_CHECKING:
    from flowrun.launcher.commands.verify import LayoutComparison

_REASONS = 5  # layouts whose refusal is shown; there may be many


def run(
    recipe: Recipe,
    folder: Path,
    progress: Progress | None = None,
    start: Checkpoint | None = None,
) -> Report:
    """Train a recipe; its plan, metrics, weights and report go to `folder`.

    progress: shows the run to a person.  start: a checkpoint to go on from (resume.py).  Raises
    FlowrunError: nothing was started if it is a RecipeError, SbpError or PlanError; Preempted if it
    was asked to end, and has saved all (launch/preemption.py).
    """
    recipe = with_steps(recipe)
    requests = Requests(recipe.launch)
    with requests.handling():
        resumes = recipe.train.resume == AUTO or nodes_of(recipe.launch).may_change
        if resumes and start is None:
            if report := _read_complete(recipe, folder, progress):
                return report
            recipe, start = _find_start(recipe, folder)
        try:
            return _run(recipe, folder, progress, start, requests)
        except AlreadyComplete as done:
            _say_complete(done.report, folder, progress)
            return done.report


def _run(
    recipe: Recipe,
    folder: Path,
    progress: Progress | None,
    start: Checkpoint | None,
    requests: Requests,
) -> Report:
    check_runs(recipe)
    listeners = make_listeners(recipe)
    recipe, planned = settle(recipe, progress)  # auto.placement: the fastest placement that fits
    with compiling():
        job = Job(recipe, start, planned=planned)  # the model, the data, what the compiler is asked
        training, _ = job.plans.compiled  # capture … rehearsal (engine/compile.py)
    if recipe.train.save:
        weights.check(job.saved, job.names)
    if recipe.launch.name != "virtual":
        check_limits(job, training, ranks_of_a_host(training.plan.num_ranks, recipe.launch))
    joins = nodes_of(recipe.launch).may_change  # a run that may be under way: see Record.begin
    with alone(folder, recipe.launch.num_hosts):
        resumed = _resume(job, start, restores=not joins) if start else ()
        limit_s = find_limit(recipe.launch.hang_s, training.rehearsal.step_s)
        record = Record(folder, job, progress, listeners, requests.complete, limit_s)
        if not joins:
            prepare(folder, resumed=start is not None or recipe.train.resume == AUTO)
        if recipe.launch.num_hosts == 1 or recipe.launch.name == "virtual":
            record.begin()  # of several hosts the first does, which is not known yet
        record.write_plan(training, (*notes(job), *resumed))
        with _end_noted(record):
            log = _execute(record, requests)  # actors act, credits return
            record.end_listeners()
        if log.notes:
            trace.write(record.folder / trace.NAME, record.job.training, log.notes)
        report = Report.of(record.job, record.job.training, log)  # foreseen and measured
        report = record.write_report(report)
        if recipe.eval.sample and progress:
            _show_sample(record)
        return report


def _execute(record: Record, requests: Requests) -> Log:
    """Train the job of a record.  Where ranks die again and again, go on with fewer; where hosts
    join or leave, with those that are there.
    """
    launch, jobs = record.asked.launch, {}
    silence_s = find_limit(launch.hang_s, record.job.training.rehearsal.step_s)
    with open_hosts(launch, silence_s, record.say) as hosts:
        while True:
            job = record.job
            jobs[job.recipe.launch.num_hosts] = job
            training, evaluation = job.plans.compiled
            kernels = kernels_of(job, training, record.say)  # op after op, or compiled
            parts = (job, training, evaluation, record, kernels, requests)
            try:
                if launch.name == "virtual":
                    return execute_virtual(*parts)
                return LocalRun(*parts, hosts).execute()
            except RanksLost as lost:
                _plan_for_fewer_ranks(record, lost)
            except HostsChanged as changed:
                _plan_for_hosts(record, changed, jobs.get(changed.num_hosts))


def _show_sample(record: Record) -> None:
    """Show what a model that was trained on text writes; the run is complete even if it cannot."""
    from flowrun.launcher.commands.sample import sample_after

    try:
        found = sample_after(record.job, record.folder)
    except Exception as error:  # of the user's model, maybe
        why = error.problem if isinstance(error, FlowrunError) else repr(error)
        record.note(f"no sample of text (eval.sample=false leaves it out): {why}")
        return
    if found and record.progress:
        record.progress.show_sample(*found)


@contextmanager
def _end_noted(record: Record) -> Iterator[None]:
    """Within, an end before the last step is written to the run's folder."""
    try:
        yield
    except (RunError, KeyboardInterrupt, Preempted) as error:
        record.write_end(*_name_end(error))
        record.advise_resume()
        raise


def _read_complete(recipe: Recipe, folder: Path, progress: Progress | None) -> Report | None:
    """Return the report of a run that is complete, and say so; None of any other."""
    report = read_complete(folder, recipe.train.steps)
    if report:
        _say_complete(report, folder, progress)
    return report


def _say_complete(report: Report, folder: Path, progress: Progress | None) -> None:
    text = f"the run in {folder} is complete: {report.first_step + report.steps} steps are done"
    (progress or Progress()).console.print(text, highlight=False, markup=False)


def _find_start(recipe: Recipe, folder: Path) -> tuple[Recipe, Checkpoint | None]:
    """Return the recipe and the checkpoint that train.resume=auto goes on from."""
    if not find_all(folder):
        return recipe, None
    from flowrun.launcher.commands import resume  # imports what few runs need: 0.8 s

    return resume.find_continuation(recipe, folder)


def _name_end(error: BaseException) -> tuple[str, str]:
    """Return how a run ended, in a word, and why."""
    if isinstance(error, Preempted):
        return PREEMPTED, error.by
    return (STOPPED, "Ctrl-C") if isinstance(error, KeyboardInterrupt) else (FAILED, str(error))


def _resume(job: Job, start: Checkpoint, restores: bool = True) -> tuple[str, ...]:
    """Put the job where the checkpoint left it, if it `restores`; return notes for a person."""
    from flowrun.launcher.commands import resume  # imports what few runs need: 0.8 s

    resume.check_data(job, start)
    if not restores:
        return ()
    resume.restore(job, start)
    return tuple(resume.notes(job, start))


def _plan_for_fewer_ranks(record: Record, lost: RanksLost) -> None:
    """Plan the rest of a run anew, for fewer ranks (launch.min_ranks); say so.

    record: of the run; what is written from now on is of the new layout.  lost: why; it is raised
    where no such layout can be planned.
    """
    before = record.job.recipe
    start = record.checkpoints[-1] if record.checkpoints else None
    layouts = layouts_on_fewer(before, before.launch.min_ranks or before.num_ranks)
    job, layout = _plan_first(before, layouts, start, lost)
    record.go_on_with(job, lost, layout)
    record.write_plan(job.training, notes(job))


def _plan_for_hosts(record: Record, changed: HostsChanged, job: Job | None) -> None:
    """Plan a run for the hosts that are here, from the state that all go on from; say so.

    record: of the run.  changed: the hosts and the state.  job: planned for as many before.
    """
    asked, hosts = record.asked, changed.num_hosts
    start = find_step(record.run_folder, changed.step)
    if job is None:
        ranks = asked.num_ranks // asked.launch.num_hosts * hosts
        fixed = (f"launch.nnodes={hosts}", *(("launch.rdzv_endpoint=''",) if hosts == 1 else ()))
        layouts = ((*fixed, *keys) for keys in layouts_on(asked, ranks))
        record.say(f"planning for {hosts} of {asked.launch.num_hosts} hosts, {ranks} ranks")
        unplanned = RunError(
            "launch.nnodes", f"no layout was found on the {ranks} ranks of {hosts}."
        )
        job, _ = _plan_first(asked, layouts, start, unplanned)
        record.go_on_from(start, job)
        record.write_plan(job.training, notes(job))
    elif start:
        _resume(job, start)
    record.go_on_from(start, job)


def _plan_first(
    asked: Recipe, layouts: Iterable[tuple[str, ...]], start: Checkpoint | None, error: RunError
) -> tuple[Job, str]:
    """Return the job of the first layout that can be planned, and the layout.

    asked: the recipe.  layouts: overrides of it, in the order to try them.  start: what it goes on
    from.  error: is raised where none can be planned, with what is wrong with each.
    """
    refused: list[str] = []
    for overrides in layouts:
        try:
            found = change(asked, overrides)
            recipe, planned = settle(replace(found, weights="") if start else found)
            job = Job(recipe, start, planned=planned)
            job.plans.compiled  # noqa: B018 - it raises where there is no plan
        except FlowrunError as reason:
            refused.append(f"{', '.join(overrides)}: {reason.where}: {reason.problem}")
            continue
        if start:
            _resume(job, start)
        return job, ", ".join(overrides)
    more = [f"and {len(refused) - _REASONS} more layouts"] if len(refused) > _REASONS else []
    problem = "\n".join((error.problem, *refused[:_REASONS], *more))
    raise RunError(error.where, problem, error.instead) from error


def settle(recipe: Recipe, progress: Progress | None = None) -> tuple[Recipe, Rehearsed | None]:
    """Return the recipe as it will run, with its plan if flowrun has placed it."""
    if not recipe.auto.placement:
        return recipe, None
    from flowrun.launcher.place.place import place
    from flowrun.launcher.place.show_placements import summary

    placed = run_in_fork(lambda: place(recipe)) if forks_autograd() else place(recipe)
    if progress:
        progress.console.print(summary(placed.found), highlight=False, markup=False)
    return placed.recipe, placed.training


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe's plan, before anything runs.

    Attributes:
        recipe: the recipe as it will run, with the placement that a search chose.
        training: the plan, and the rehearsal of a step (seconds, bytes).
        text: what `flowrun plan` prints.
    """

    recipe: Recipe
    training: Rehearsed
    text: str

    def __str__(self) -> str:
        return self.text


def plan(recipe: Recipe, overrides: Sequence[str] = (), save: Path | None = None) -> Planned:
    """Show what a recipe will do: stages, layers, boxings, memory, time; first the candidates, if
    it asks to be placed.  Nothing is started.

    overrides: what the recipe was composed from.  save: where to write the placed recipe.
    """
    make_listeners(recipe)  # a run would refuse them, too
    recipe = with_steps(recipe)
    terminal, width = sys.stdout.isatty(), output_width()
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    with console.capture() as text:
        planned = None
        if recipe.auto.placement:
            from flowrun.launcher.place.place import place
            from flowrun.launcher.place.show_placements import table

            placed = place(recipe)
            recipe, planned = placed.recipe, placed.training
            console.print(table(placed.found), "")
            if save:
                from flowrun.launcher.place.saved import save as write

                write(placed, list(overrides), save)
        job = Job(recipe, values=False, planned=planned)
        console.print(plan_report(job, width))
        if save and planned:
            console.print(f"the recipe is saved: flowrun recipe={save}", soft_wrap=True)
    shown = text.get().rstrip()
    return Planned(recipe=recipe, training=job.training, text=shown)


def plan_level(recipe: Recipe, level: str) -> str:
    """Show one level of the compiler as text (report/show_level.py).  Nothing is started.

    Raises RecipeError for an unknown level, and as `plan` does.
    """
    from flowrun.launcher.report.show_level import check_level, level_report

    check_level(level)
    recipe, planned = settle(with_steps(recipe))
    return level_report(Job(recipe, values=False, planned=planned), level)


def verify(recipe: Recipe) -> LayoutComparison:
    """Train a few steps of the recipe under every layout, and compare each with plain torch."""
    from flowrun.launcher.commands.verify import compare_layouts

    return compare_layouts(with_steps(recipe), run)
