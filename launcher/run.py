"""The story of a run: compose, place, make, plan, supervise, report.  A newcomer reads this file
first.

recipe -> logical graph -> plan -> rehearsal -> actors -> report.  What a rank does is planned once
in this process; supervise/ forks the ranks, and keeps the run alive until its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flowrun.launcher.commands.plan_recipe import Planned, plan, plan_level
from flowrun.launcher.job.compiling import compile_job
from flowrun.launcher.job.faults import compiling
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.job_plans import probing
from flowrun.launcher.job.limits import check_limits
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.job.resumed import put_at
from flowrun.launcher.listeners.make import make_listeners
from flowrun.launcher.place.settle import Replan, settle
from flowrun.launcher.recipe.device import check_runs
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import AUTO, nodes_of, time_limit_s
from flowrun.launcher.report import trace_file as trace
from flowrun.launcher.report.notes import notes
from flowrun.launcher.report.progress import Progress
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import Report, read_complete
from flowrun.launcher.store import fetched_run, kept_run
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import Checkpoint, find_all, lock_run_folder, prepare
from flowrun.launcher.supervise.driver import Driver, error_of, supervising
from flowrun.launcher.supervise.hands.lease import Lease, Owner
from flowrun.launcher.supervise.hands.monitor import monitoring
from flowrun.launcher.supervise.hands.signals import Signals
from flowrun.launcher.supervise.hosts.meeting import ranks_of_a_host
from flowrun.launcher.supervise.life.instructions import COMPLETE, THERE, End

if TYPE_CHECKING:
    from flowrun.launcher.commands.verify import LayoutComparison

__all__ = ["Planned", "plan", "plan_level", "run", "settle", "verify"]


def run(
    recipe: Recipe, folder: Path, progress: Progress | None = None, start: Checkpoint | None = None
) -> Report:
    """Train a recipe; its plan, metrics, weights and report go to `folder`.

    progress: shows the run to a person.  start: a checkpoint to begin at (resume.py).  Raises
    FlowrunError: nothing was started if it is a RecipeError, SbpError or PlanError; Preempted if it
    was asked to end, and has saved all (supervise/hands/signals.py).
    """
    recipe = with_steps(recipe)
    signals = Signals(time_limit_s(recipe.launch))
    with signals.handling(), monitoring(recipe.launch, folder, progress):
        if (recipe.train.resume == AUTO or nodes_of(recipe.launch).may_change) and start is None:
            fetched_run.continue_at(recipe.train.store, folder)
            if report := read_complete(folder, recipe.train.steps):
                kept_run.keep_complete(recipe, folder)
                return _say_complete(report, folder, progress)
            if find_all(folder):
                from flowrun.launcher.commands import resume  # imports what few runs need: 0.8 s

                recipe, start = resume.find_continuation(recipe, folder)
        return _run(recipe, folder, progress, start, signals)


def _run(
    recipe: Recipe,
    folder: Path,
    progress: Progress | None,
    start: Checkpoint | None,
    signals: Signals,
) -> Report:
    check_runs(recipe)
    resumed = start is not None or recipe.train.resume == AUTO
    joins = nodes_of(recipe.launch).may_change  # a run that may be under way: see Record.begin
    kept = kept_run.open_store(recipe.train.store, folder, resumed, joins)
    listeners = make_listeners(recipe)
    with probing(recipe) as probed:  # this machine, in other processes
        recipe, placed = settle(recipe)  # auto.placement: the fastest placement that fits
        if placed and progress:
            progress.console.print(str(placed.found), highlight=False, markup=False)
        with compiling():
            planned = placed.training if placed else None
            job = Job(recipe, start, planned=planned, probed=probed)  # what the compiler is asked
            training, _ = job.plans.compiled  # capture … rehearsal (engine/compile.py)
    if recipe.train.save:
        weights.check(job.saved, job.names)
    if recipe.launch.name != "virtual":
        check_limits(job, training, ranks_of_a_host(training.plan.num_ranks, recipe.launch))
    lease, several = Lease(folder), recipe.launch.num_hosts > 1 and recipe.launch.name != "virtual"
    with lock_run_folder(folder, recipe.launch.num_hosts):
        if not several:
            lease.take(Owner.of_this())
        changes = put_at(job, start, restores=not joins) if start else ()
        record = Record(folder, job, progress, kept)
        if not joins:
            prepare(folder, resumed)
        if not several:  # of several hosts the first does, which is not known yet
            record.begin()
        record.write_plan(training, (*notes(job), *changes))
        compiled, replan = compile_job(job, record.say), Replan(record)
        driver = Driver(record, compiled, listeners, replan, lease)
        with supervising(driver, signals) as end:
            return _report(driver, record, end)


def _report(driver: Driver, record: Record, end: End) -> Report:
    """Write down how a run ended: its report if it is complete; else raise why it is not."""
    if end.status == THERE:
        report = read_complete(record.run_folder, driver.state.terms.steps)
        assert report is not None
        return _say_complete(report, record.run_folder, record.progress)
    record.close()
    if end.status != COMPLETE:
        error = driver.ranks.exception or error_of(end)
        record.write_end(end.status, str(error) if end.fault else end.by)
        record.advise_resume()
        record.end_store(error)
        raise error
    driver.ledger.join_weights(record, driver.state)
    log, job = driver.ledger.log(record), record.job
    if log.notes:
        trace.write(record.folder / trace.NAME, job.training, log.notes)
    report = record.write_report(Report.of(job, job.training, log))  # foreseen and measured
    if job.recipe.eval.sample and record.progress:
        from flowrun.launcher.commands.write_text import show_text  # imports what few runs need

        show_text(record)
    record.end_store()
    return report


def _say_complete(report: Report, folder: Path, progress: Progress | None) -> Report:
    text = f"the run in {folder} is complete: {report.first_step + report.steps} steps are done"
    (progress or Progress()).console.print(text, highlight=False, markup=False)
    return report


def verify(recipe: Recipe) -> LayoutComparison:
    """Train a few steps of the recipe under every layout, and compare each with plain torch."""
    from flowrun.launcher.commands.verify import compare_layouts

    return compare_layouts(with_steps(recipe), run)
