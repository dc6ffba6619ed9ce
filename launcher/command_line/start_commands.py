"""Commands around recipes and runs: runs, init, schema, recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrun.launcher.command_line.app import app, show_errors
from flowrun.launcher.command_line.help_texts import INIT_HELP, RUNS_HELP, SCHEMA_HELP


@app.command(help=RUNS_HELP)
def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER | RUN_DIR | A B]", show_default=False)
    ] = None,
    follow: Annotated[
        Path | None,
        typer.Option("--follow", metavar="RUN_DIR", help="Show its steps as they come."),
    ] = None,
) -> None:
    """List runs, compare two, follow one (see RUNS_HELP)."""
    with show_errors([], None):
        from flowrun.launcher.commands.run_folders.list_runs import show_runs
        from flowrun.launcher.terminal.console import wide_console

        show_runs(folders or [], follow, wide_console())


@app.command(help=INIT_HELP)
def init(
    model: Annotated[str, typer.Argument(metavar="my_models.Net | FOLDER", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[data.key=value]…", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="The data set's class; without it one in the model's module."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="The recipe; without it recipes/NAME.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a recipe.")] = False,
) -> None:
    """Write a recipe for a model (see INIT_HELP)."""
    with show_errors([], None):
        from flowrun.launcher.commands.start.init_recipe import show_written, write_recipe
        from flowrun.launcher.terminal.console import wide_console

        show_written(write_recipe(model, data, to, words or (), force), wide_console())


@app.command(help=SCHEMA_HELP)
def schema(
    to: Annotated[Path, typer.Option("--to", help="The file.")] = Path("recipe.schema.json"),
) -> None:
    """Write the schema of recipes (see SCHEMA_HELP)."""
    with show_errors([], None):
        from flowrun.launcher.commands.start.json_schema import write_schema

        line = write_schema(to)
        typer.echo(f"{to} is written; as the first line of a recipe editors read:\n{line}")


@app.command()
def recipes() -> None:
    """List the recipes that there are, with a line each."""
    from rich.console import Console
    from rich.table import Table

    from flowrun.launcher.recipe.hydra_source import FOLDERS, describe, recipe_names

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, file in recipe_names().items():
        table.add_row(name, describe(file))
    console = Console()
    console.print(table)
    console.print(
        f"Run one with flowrun recipe=NAME; ./recipes and the folders in ${FOLDERS} add more.",
        style="dim",
    )
