"""hydra_jobs: arguments -> Hydra's main, which composes one job or those of a sweep -> what came of
each.  Imports are late: a mistake in the arguments is shown at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flowrun.engine.errors import FlowrunError, RecipeError
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.console import STDOUT
from flowrun.launcher.terminal.exit_status import INTERRUPTED, OK, PREEMPTED
from flowrun.launcher.urls.object_store import is_url

if TYPE_CHECKING:  # imports are late
    from omegaconf import DictConfig

    from flowrun.launcher.recipe.recipe import Recipe

JobOutcome = tuple[list[str], object]  # the arguments of a job, and what came of it


def hydra_jobs(overrides: list[str], flags: list[str], config_dir: str | None) -> list[object]:
    """Let Hydra compose and run one job, or many; return the outcome of each: its report, or the
    FlowrunError that ended it.

    overrides: "key=value".  flags: Hydra's own, such as -m.  config_dir: the user's own groups.
    """
    with pause_collection():
        import hydra
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        from flowrun.launcher.recipe import hydra_source
        from flowrun.launcher.recipe.compose import spell
        from flowrun.launcher.recipe.key_schema import schema
        from flowrun.launcher.recipe.recipe_errors import from_hydra

        hydra_source.register()
        spelled = spell(overrides)
    jobs: list[JobOutcome] = []

    def train(cfg: DictConfig) -> object:
        from flowrun.launcher.report.sweep_table import JobObjective

        # as it was typed: what a reference stands for is looked up where its key is read
        task = HydraConfig.get().overrides.task
        words: list[str] = OmegaConf.to_container(task, resolve=False)  # type: ignore[assignment]
        jobs.append((words, None))
        outcome = _job(cfg, words, config_dir)
        jobs[-1] = words, outcome
        return JobObjective.of(cfg.sweep.objective, outcome)

    folder, name = f"pkg://{hydra_source.CONFIG_MODULE}", hydra_source.CONFIG_NAME
    job = hydra.main(version_base="1.3", config_path=folder, config_name=name)(train)
    composes = config_dir or hydra_source.may_choose_mode(spelled)
    with _command_line(["flowrun", *spelled, *flags]), nullcontext() if composes else _no_mode():
        doing.clear()  # Hydra prints, too
        try:
            job()
        except (KeyboardInterrupt, SystemExit):  # the latter of a job that was asked to end
            _show_jobs([each for each in jobs if each[1] is not None])
            raise
        except hydra_source.COMPOSING_ERRORS as error:
            if jobs:  # composed: the error is a job's own
                raise
            raise from_hydra(error, schema()) from error
    # what came of jobs in the queue that are waited for; of others what there is
    outcomes: list[Any] = [outcome for _, outcome in jobs]
    found = [each.outcome() if getattr(each, "waits", False) else each for each in outcomes]
    if stopped := {getattr(each, "status", OK) for each in outcomes} & {PREEMPTED, INTERRUPTED}:
        raise SystemExit(max(stopped))
    return found


@contextmanager
def _no_mode() -> Iterator[None]:
    """Spare Hydra to compose everything a first time, for hydra.mode, which nothing sets."""
    from hydra._internal.hydra import Hydra

    usual = Hydra.get_mode
    Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = usual  # type: ignore[method-assign]


def _show_jobs(jobs: list[JobOutcome]) -> None:
    """Print the jobs of a sweep that a signal ends; Hydra calls none of its callbacks then."""
    if not jobs:
        return
    from flowrun.launcher.report.sweep_table import JobRow, comparison, readable
    from flowrun.launcher.terminal.console import wide_console

    doing.clear()
    console = wide_console()
    rows = [JobRow(readable(words), outcome).wait() for words, outcome in jobs]
    console.print(comparison(rows, console.width))


def _let_ctrl_c_raise() -> None:
    """Let Ctrl-C raise its error, which until here ended the process at once (cli.py): from here on
    a sweep shows its jobs, and a run ends its ranks.
    """
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _job(cfg: DictConfig, words: list[str], config_dir: str | None) -> object:
    """Run one job, in Hydra's run folder.  words: that it was composed of."""
    from hydra.core.hydra_config import HydraConfig

    from flowrun.launcher.recipe.compose import regroup, to_recipe

    try:
        if HydraConfig.get().job.chdir:
            raise RecipeError(
                "hydra.job.chdir",
                "files and modules of a recipe are looked for where the command is typed, and not"
                " in the run's folder.",
                "Leave it out: what a run writes is in its folder all the same (hydra.run.dir).",
            )
        if is_url(HydraConfig.get().run.dir):
            raise RecipeError(
                "hydra.run.dir",
                "it is a URL, and a run writes to a folder of the disk.",
                "Write train.store, under which the folder is kept, too.",
            )
        recipe = to_recipe(regroup(cfg, words, config_dir))
        if recipe.launch.name in ("slurm", "ray"):
            from flowrun.launcher.run import settle

            recipe, _ = settle(recipe)
            return _submit(recipe, Path(HydraConfig.get().runtime.output_dir))
        with doing.keep_lines(STDOUT):
            doing.doing("importing torch")
            with pause_collection():
                from flowrun.launcher.report.progress import Progress
                from flowrun.launcher.run import run as run_recipe
            _let_ctrl_c_raise()
            return run_recipe(recipe, Path(HydraConfig.get().runtime.output_dir), Progress())
    except FlowrunError as error:
        _leave_nothing(Path(HydraConfig.get().runtime.output_dir))
        return error


def _leave_nothing(folder: Path) -> None:
    """Remove the folder of a run that never began, where Hydra has left its own files alone."""
    hydras = folder / ".hydra"
    with suppress(OSError):
        if [*folder.iterdir()] == [hydras]:
            shutil.rmtree(hydras)
            folder.rmdir()


def _submit(recipe: Recipe, folder: Path) -> object:
    """Submit a job to the queue, or to Ray; return its report, if it is to be waited for and no
    sweep has more to submit.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    several = HydraConfig.get().mode == RunMode.MULTIRUN
    if recipe.launch.name == "ray":
        from flowrun.launcher.command_line.ray_jobs import submit as begin

        job = begin(recipe, folder, HydraConfig.get().job.num if several else None)
        if several and not recipe.sweep.objective:
            return job
        outcome = job.outcome()
        if job.status and (not several or job.status in (PREEMPTED, INTERRUPTED)):
            raise SystemExit(job.status)  # its first host has said why
        return outcome
    from flowrun.launcher.command_line.slurm import submit

    submitted = submit(recipe, folder)
    typer.echo(f"submitted: {submitted}")
    if not submitted.waits or several:
        return submitted
    from flowrun.launcher.report.progress import Progress

    outcome = submitted.outcome()
    if not isinstance(outcome, FlowrunError):
        Progress().show_report(outcome, folder)
    return outcome


@contextmanager
def _command_line(argv: list[str]) -> Iterator[None]:
    """Set what Hydra's main reads: the arguments, and that errors are raised instead of printed."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full
