"""Commands around recipes and runs: runs, status, top, report, init, check, schema, manifest,
recipes.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flowrun.launcher.command_line import app as shared
from flowrun.launcher.command_line.app import app
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.exit_status import RECIPE_WRONG
from flowrun.launcher.urls.object_store import is_url


class PageFormat(StrEnum):
    """A page is written in one of these."""

    html = "html"
    json = "json"


@app.command()
def runs(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="[FOLDER | RUN_DIR | A B]", show_default=False)
    ] = None,
    follow: Annotated[
        Path | None,
        typer.Option("--follow", metavar="RUN_DIR", help="Show its steps as they come."),
    ] = None,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    """List the runs of a folder; without one those of outputs, multirun and runs.

    Each with its steps, loss and status: running, complete, preempted, stopped,
    failed, or died (it was killed).  One run's folder shows its figures; two are
    compared: the keys that differ, and figures. --follow shows the steps of a run
    as they come, until it ends.

      flowrun runs
      flowrun runs outputs/2026-01-31/12-00-00_gpt_tiny outputs/2026-01-31/13-00-00_gpt_tiny
      flowrun runs --follow outputs/2026-01-31/13-00-00_gpt_tiny
    """
    with shared.show_errors([], None):
        from flowrun.launcher.commands.run_folders.list_runs import default_folders, show_runs
        from flowrun.launcher.commands.run_folders.run_summary import summarize_all
        from flowrun.launcher.terminal.console import wide_console

        here = [_local(folder) for folder in folders or []]
        if form is shared.Format.json:
            shared.print_found(summarize_all(here or default_folders()), form)
            return
        show_runs(here, follow, wide_console())


def _local(source: str) -> Path:
    """Return a folder, or where what is said of the runs at a URL was fetched to."""
    if not is_url(source):
        return Path(source)
    from flowrun.launcher.store.fetched_run import fetch_figures

    return fetch_figures(source)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    """Say how far a run is.

    Exit status 0 while it runs and when it has ended as it should, else 1.  It reads the
    run's folder alone, on any machine that sees it.

      flowrun status outputs/2026-01-31/13-00-00_gpt_tiny --json
    """
    with shared.show_errors([], None):
        from flowrun.launcher.commands.run_folders.run_summary import summarize

        summary = summarize(run)
        shared.print_found(summary, shared.Format.json if as_json else form)
        raise typer.Exit(not summary.is_well)


@app.command()
def top(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN_DIR]", help="Without it the newest run.")
    ] = None,
    serve: Annotated[
        str, typer.Option("--serve", metavar="PORT", help="As a page for a browser of this host.")
    ] = "",
) -> None:
    """Show a run live: its figures and their curves, until it ends or Ctrl-C.

    It reads the run's folder alone, on any machine that sees it.  Off a terminal it
    prints once.

      flowrun top
      flowrun top outputs/2026-01-31/13-00-00_gpt_tiny
      flowrun top --serve 8080
    """
    with shared.show_errors([], None):
        from rich.console import Console

        from flowrun.launcher.commands.run_folders.top import choose_run, show_top

        if serve:
            from flowrun.launcher.page.serve_page import serve_page

            serve_page(choose_run(run), serve, typer.echo)
        show_top(choose_run(run), Console())


@app.command()
def report(
    given: Annotated[list[str], typer.Argument(metavar="RUN_DIR… | recipe=NAME [key=value]…")],
    to: Annotated[Path | None, typer.Option("--to", help="Else report.html.")] = None,
    form: Annotated[
        PageFormat, typer.Option("--format", help="JSON is printed without --to.")
    ] = PageFormat.html,
    config_dir: shared.ConfigDir = None,
) -> None:
    """Write a page of a plan, runs or a sweep: one HTML file, which needs no network.

    Of a recipe it has layout, timeline, memory, communication, and what bounds the
    step; of runs their curves, figures, differences, the traced step, texts.  It
    reads their folders alone.  JSON is the same data.

      flowrun report recipe=gpt_hybrid --to plan.html
      flowrun report outputs/2026-01-31/12-00-00_gpt_tiny outputs/2026-01-31/13-00-00_gpt_tiny
      flowrun report multirun/2026-01-31/12-00-00 --format json --to sweep.json
    """
    with shared.show_errors(given, config_dir):
        from flowrun.launcher.page.make_page import make_page, write_page

        page = make_page(given, config_dir)
        as_json = form is PageFormat.json
        if as_json and to is None:
            shared.print_found(page, shared.Format.json)
            return
        said = write_page(page, to or Path("report.html"), as_json=as_json)
        doing.clear()
        typer.echo(said)


@app.command()
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
    no_try: Annotated[
        bool, typer.Option("--no-try", help="Neither plan it nor train a step of it.")
    ] = False,
) -> None:
    """Write a commented recipe for a model, by what its forward and its data show.

    The model is a class, a function, or a module or file that defines one; or a
    folder of Hugging Face's.  Values of items become arguments of forward, by
    their names or in their order, and the loss is one for what is left and what
    forward returns.  What cannot be known stands as ??? in the recipe; one without
    is planned, and a step of it trained.  Exit status 2 if that fails.

      flowrun init my_models.Net
      flowrun init my_models.Net data.folder=images/ model.width=64
      flowrun init my_models.py --data my_data.Images --to recipes/mine.yaml --force
      flowrun init path/to/llama
    """
    doing.doing("importing torch")
    with shared.show_errors(named := [], None):
        from flowrun.launcher.commands.start.init_recipe import show_written, write_recipe
        from flowrun.launcher.terminal.console import wide_console

        written = write_recipe(model, data, to, words or (), force)
        doing.clear()
        show_written(written, wide_console())
        if not no_try and not written.missing:
            from flowrun.launcher.commands.try_recipe import try_recipe
            from flowrun.launcher.run import run

            named.append(f"recipe={written.file}")
            shared.print_found(try_recipe(written.file, run), shared.Format.text)


@app.command()
def check(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE]… [key=value]…", show_default=False)
    ] = None,
    config_dir: shared.ConfigDir = None,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    """Check the keys of recipes, without torch, models or data: in a second, for CI.

    Without a recipe all that `flowrun recipes` lists.  Exit status 2 if one is wrong.
    What depends on the model, such as its shapes, `flowrun plan` checks.

      flowrun check
      flowrun check recipes/mine.yaml gpt_dp train.batch_size=8
    """
    with shared.show_errors([], config_dir):
        from flowrun.launcher.commands.start.check_recipes import check_recipes

        found = check_recipes(words or [], config_dir)
        shared.print_found(found, form)
        raise typer.Exit(0 if found.right else RECIPE_WRONG)


@app.command()
def schema(
    to: Annotated[
        Path | None, typer.Option("--to", help="The file; else recipe.schema.json.")
    ] = None,
    of: Annotated[
        str, typer.Option("--of", help="Of the --format json of a command; printed without --to.")
    ] = "",
) -> None:
    """Write the keys of a recipe as JSON Schema, for editors.

    An editor with a YAML language server then completes keys, shows what they
    mean and marks what is wrong.

      flowrun schema --to recipe.schema.json
      flowrun schema --of runs
    """
    with shared.show_errors([], None):
        if of:
            from flowrun.launcher.commands.start.output_schemas import schema_of

            text = schema_of(of)
            typer.echo(text) if to is None else to.write_text(f"{text}\n")
            return
        from flowrun.launcher.commands.start.json_schema import write_schema

        to = to or Path("recipe.schema.json")
        line = write_schema(to)
        typer.echo(f"{to} is written; as the first line of a recipe editors read:\n{line}")


@app.command()
def manifest(
    platform: Annotated[str, typer.Argument(metavar="kubernetes|kubeflow|skypilot|slurm")],
    overrides: shared.Overrides = None,
    hosts: Annotated[int, typer.Option("--hosts", min=1, help="How many.")] = 1,
    image: Annotated[str, typer.Option("--image", help="Of the container.")] = "flowrun:latest",
    volume: Annotated[
        str, typer.Option("--volume", metavar="NAME:/PATH", help="Disk that all hosts see.")
    ] = "",
    gpu: Annotated[str, typer.Option("--gpu", help="SkyPilot's name of it.")] = "H100",
    to: Annotated[Path | None, typer.Option("--to", help="The file; else it is printed.")] = None,
) -> None:
    """Write the file that starts a recipe on the hosts of a platform.

    A JobSet, a TrainJob, a task of SkyPilot or a script of sbatch: it asks for a GPU a
    rank with launch.device=cuda, else for cores, and starts again what ended with 75.

      flowrun manifest slurm recipe=gpt_hybrid --hosts 2 --to job.sh
      flowrun manifest kubernetes recipe=gpt_hybrid --hosts 2 --volume runs:/runs
    """
    with shared.show_errors(overrides or [], None):
        from flowrun.launcher.commands.start.manifest import write_manifest

        text = write_manifest(platform, overrides or (), hosts, image, volume, gpu)
        typer.echo(text, nl=False) if to is None else to.write_text(text)


@app.command()
def recipes(form: shared.AsFormat = shared.Format.text) -> None:
    """List the recipes, one line each."""
    from flowrun.launcher.commands.start.list_recipes import list_recipes, show_recipes

    found = list_recipes()
    if form is shared.Format.json:
        shared.print_found(found, form)
    else:
        show_recipes(found)
