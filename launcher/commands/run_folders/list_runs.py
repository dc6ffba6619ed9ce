"""The runs of some folders, in a line each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.run_folders.compare_runs import compare_runs, show_loss
from flowrun.launcher.commands.run_folders.follow_run import follow_run
from flowrun.launcher.commands.run_folders.run_summary import (
    RUNNING,
    RunSummary,
    find_runs,
    read_keys,
    summarize,
)
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.store.checkpoint import RECIPE
from flowrun.launcher.terminal.units import duration

FOLDERS = ("outputs", "multirun", "runs")  # where runs lie if no folder is named
_WIDE = 100  # columns from which a list has the recipe, too


def show_runs(folders: Sequence[Path], followed: Path | None, console: Console) -> None:
    """Do what the command is asked.  Raises RecipeError.

    folders: a folder of runs, a run, or two runs.  followed: a run to follow.
    """
    if followed:
        follow_run(followed, console)
    elif folders and all((folder / RECIPE).exists() for folder in folders):
        if len(folders) > 2:
            raise CommandLineError(str(folders[2]), "two runs are compared, and this is a third.")
        compare_runs(folders, console)
    elif len(folders) > 1 or any(not folder.is_dir() for folder in folders):
        wrong = next(folder for folder in folders if not (folder / RECIPE).exists())
        read_keys(wrong)
    else:
        list_runs(folders or [Path(name) for name in FOLDERS if Path(name).is_dir()], console)


def list_runs(folders: Sequence[Path], console: Console) -> None:
    """Print a line for each run, the newest last."""
    runs: list[RunSummary] = []
    for folder in find_runs(folders):
        with suppress(RecipeError):
            runs.append(summarize(folder))
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold", min_width=18)
    wide = console.width >= _WIDE
    if wide:  # it is part of the folder's name
        table.add_column("recipe", no_wrap=True)
    for heading in ("steps", "loss", "valid.", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for run in runs:
        table.add_row(
            str(run.folder),
            *([run.name] if wide else []),
            f"{run.done:,}/{run.asked:,}" if run.asked else f"{run.done:,}",
            show_loss(run.loss),
            show_loss(run.validation),
            duration(max(0.0, time.time() - run.time)),
            run.status,
            style=None if run.status in ("complete", RUNNING) else "yellow",
        )
    if not table.row_count:
        where = ", ".join(map(str, folders)) or " or ".join(FOLDERS)
        console.print(f"there is no run in {where}: flowrun recipe=mlp_hybrid makes one")
        return
    console.print(table)
    console.print(
        "flowrun runs A B compares two, flowrun runs --follow A shows the steps of one", style="dim"
    )
