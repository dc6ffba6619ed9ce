"""All commands share this: the program, arguments, exit statuses, and how an error is shown."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrun.engine.errors import TRACEBACK, ArgumentError, FlowrunError, RunError
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.console import wrap_words
from flowrun.launcher.terminal.exit_status import INTERRUPTED, RECIPE_WRONG, RUN_FAILED

if TYPE_CHECKING:
    from flowrun.launcher.recipe.recipe import Recipe


class Format(StrEnum):
    """A command prints what it found in one of these."""

    text = "text"
    json = "json"


RunFolder = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or its URL.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="recipe=NAME [key=value]…", show_default=False)
]
KeyChanges = Annotated[list[str] | None, typer.Argument(metavar="[key=value]…", show_default=False)]
OfStep = Annotated[
    int | None, typer.Option("--step", help="Of the checkpoint; without it the newest.")
]
ConfigDir = Annotated[
    str | None,
    typer.Option(
        "--config-dir", help="A folder of your own groups (model/, data/ …), under new names."
    ),
]
AsFormat = Annotated[
    Format, typer.Option("--format", help="Text, or one object of JSON for programs.")
]
Best = Annotated[
    bool, typer.Option("--best", help="Of the checkpoint that is best by train.keep_best.")
]

app = typer.Typer(
    name="flowrun",
    help="One YAML recipe trains any PyTorch model in any mix of parallelism.\n\n"
    "flowrun recipe=NAME key=value … runs a recipe; `flowrun recipes` lists them, "
    "`flowrun run --help` says more.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_error(text: str) -> None:
    """Print an error: on a terminal its first line in red, and no word is broken."""
    if sys.stderr.isatty():
        text = wrap_words(text, shutil.get_terminal_size().columns)
        first, end, rest = text.partition("\n")
        text = f"{typer.style(first, fg='red')}{end}{rest}"  # echo drops it for NO_COLOR
    typer.echo(text, err=True, color=False if os.environ.get("NO_COLOR") else None)


def print_found(found: object, form: Format) -> None:
    """Print what a command found, as it prints itself or as JSON."""
    from flowrun.launcher.terminal.as_json import to_json

    doing.clear()
    typer.echo(to_json(found) if form is Format.json else found)


def load_recipe(overrides: list[str], config_dir: str | None) -> Recipe:
    """Compose a recipe.  config_dir: the user's own groups.  Raises RecipeError."""
    with pause_collection():
        from flowrun.launcher.recipe.compose import load

    return load(overrides, config_dir)


@contextmanager
def open_run(
    source: str,
    changes: Sequence[str] = (),
    config_dir: str | None = None,
    step: int | None = None,
    best: bool = False,
    continues: bool = False,
) -> Iterator[Path]:
    """Yield the folder of a run, or of a copy of one that is kept at a URL; within, as show_errors.

    step, best: the checkpoint that is read.  continues: in a new folder of outputs, not the cache.
    """
    with show_errors([], None):
        from flowrun.launcher.urls.object_store import is_url

        folder = Path(source)
        if is_url(source):
            from flowrun.launcher.store.fetched_run import fetch_run

            name = f"{datetime.now():%Y-%m-%d/%H-%M-%S}_{source.rstrip('/').rpartition('/')[2]}"
            to = Path("outputs", name) if continues else None
            folder = fetch_run(source, step, best, to)
    with show_errors([f"recipe={folder / 'recipe.yaml'}", *changes], config_dir):
        yield folder


@contextmanager
def show_errors(overrides: list[str], config_dir: str | None) -> Iterator[None]:
    """Within, an error becomes its text and an exit status; Ctrl-C ends quietly.

    overrides, config_dir: of the command, to find the place of a key that an error names.
    """
    try:
        yield
    except KeyboardInterrupt:
        doing.clear()
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except SystemExit as ended:
        if by := getattr(ended, "by", ""):  # Preempted, which few commands import
            doing.clear()
            typer.echo(f"stopped by {by}", err=True)
        raise
    except Exception as error:
        if isinstance(error, typer.Exit) or os.environ.get(TRACEBACK) == "1":
            raise
        from flowrun.launcher.recipe.recipe_errors import CommandLineError, explain

        if isinstance(error, ArgumentError):  # of what the command itself has made
            error = CommandLineError(error.argument, error.problem, error.instead)
        status = RECIPE_WRONG if isinstance(error, FlowrunError) else RUN_FAILED
        if not isinstance(error, FlowrunError):
            from flowrun.launcher.job.faults import own_fault

            error = own_fault(error)
        text = explain(error, overrides, config_dir)
        doing.clear()
        show_error(text)
        raise typer.Exit(RUN_FAILED if isinstance(error, RunError) else status) from None
