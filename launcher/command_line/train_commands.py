"""Commands that plan and train: run, plan, verify, resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.launcher.command_line import app as shared
from flowrun.launcher.command_line.app import app
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.exit_status import RECIPE_WRONG, RUN_FAILED
from flowrun.launcher.urls.object_store import is_url

if TYPE_CHECKING:  # torch takes seconds to import
    from flowrun.launcher.commands.verify import Difference


@app.command()
def run(
    overrides: shared.Overrides = None,
    multirun: Annotated[
        bool,
        typer.Option(
            "--multirun", "-m", help="Run every combination of key=a,b,c; ends with a table."
        ),
    ] = False,
    config_dir: shared.ConfigDir = None,
    cfg: Annotated[
        str | None,
        typer.Option(
            "--cfg", metavar="job|hydra|all", help="Show the composed keys instead of running."
        ),
    ] = None,
    resolve: Annotated[
        bool, typer.Option("--resolve", help="With --cfg: replace ${…} by values.")
    ] = False,
    package: Annotated[
        str | None, typer.Option("--package", "-p", help="With --cfg: this key only.")
    ] = None,
    info: Annotated[
        str | None,
        typer.Option("--info", metavar="searchpath|defaults|…", help="Show what Hydra did."),
    ] = None,
) -> None:
    """Train a recipe.  `run` may be left out.

    [bold]recipe=NAME[/] or [bold]recipe=path/to/file.yaml[/] names what to train;
    every other argument changes a key of it:

      flowrun recipe=gpt_hybrid
      flowrun recipe=gpt_hybrid placement.axes.data=2 train.steps=50
      flowrun recipe=gpt_dp model=gpt_small model.depth=6 optim.lr=1e-3 launch=virtual
      flowrun recipe=gpt_tp sbp.head.weight.tensor=B
      flowrun -m recipe=gpt_dp,gpt_tp train.batch_size=16,32

    [bold]--cfg job[/] shows all keys and their values.  A run's folder is
    outputs/DATE/TIME_NAME (change it: hydra.run.dir=…). On several hosts, the
    same command on each: srun, mpirun and torchrun say the rest, else
    launch.nnodes=2 launch.rdzv_endpoint=HOST:PORT.

    Ctrl-C or SIGTERM finishes the step, saves a checkpoint and ends; a second one
    ends at once.  With train.resume=auto and hydra.run.dir=FOLDER the same
    command goes on from there.  Exit status: 0 the run is complete, 1 it failed,
    2 the recipe was refused, 75 SIGTERM or launch.time_limit, 130 Ctrl-C.
    """
    given = overrides or []
    flags = ["--multirun"] * multirun + ["--resolve"] * resolve
    for flag, value in (
        ("--config-dir", config_dir),
        ("--cfg", cfg),
        ("--package", package),
        ("--info", info),
    ):
        flags += [flag, value] if value is not None else []
    with shared.show_errors(given, config_dir):
        from flowrun.launcher.command_line.hydra_jobs import hydra_jobs
        from flowrun.launcher.command_line.seats import take_seat

        outcomes = hydra_jobs([*take_seat(given, config_dir), *given], flags, config_dir)
        failed = [outcome for outcome in outcomes if isinstance(outcome, FlowrunError)]
        if failed and not multirun:
            raise failed[0]
        if any(isinstance(outcome, RunError) for outcome in failed):
            raise typer.Exit(RUN_FAILED)
        if failed and len(failed) == len(outcomes):
            raise typer.Exit(RECIPE_WRONG)


@app.command()
def plan(
    overrides: shared.Overrides = None,
    config_dir: shared.ConfigDir = None,
    save_recipe: Annotated[
        Path | None,
        typer.Option("--save-recipe", help="With auto.placement: the file of the best recipe."),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="NAME", help="Print this level of the compiler instead."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page of it, too.")
    ] = None,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    """Show the plan of a recipe, without starting anything.

    Layers with SBP, stage and shapes; each boxing with its bytes; memory of each
    rank; step time and bubble foreseen; the timeline.

      flowrun plan recipe=gpt_hybrid placement.stages=4

    With auto.placement=true the best placements of its ranks come first;
    --save-recipe writes the recipe of the best one.

      flowrun plan recipe=gpt_hybrid auto.placement=true --save-recipe recipes/placed.yaml

    --level prints one level of the compiler: recipe, captured, staged, trained,
    laid_out, signed, boxed, regions, actors, registers, buffers or order.

      flowrun plan recipe=mlp_hybrid --level boxed

    --html writes the page of `flowrun report`, --format json prints its data.

      flowrun plan recipe=gpt_hybrid --html plan.html
    """
    given = overrides or []
    with shared.show_errors(given, config_dir):
        recipe = shared.load_recipe(given, config_dir)
        if save_recipe and not recipe.auto.placement:
            raise RecipeError(
                "auto.placement",
                "--save-recipe writes the recipe that a search has found, and none is asked for.",
                "Add auto.placement=true.",
            )
        as_json = form is shared.Format.json
        if level and (html or as_json):
            from flowrun.launcher.recipe.recipe_errors import CommandLineError

            asked = "--html" if html else "--format json"
            raise CommandLineError(asked, "a level is text alone.", "Leave out --level.")
        if level:
            from flowrun.launcher.run import plan_level

            text = plan_level(recipe, level)
        else:
            from flowrun.launcher.run import plan as plan_recipe

            planned = plan_recipe(recipe, given, save_recipe)
            text = str(planned)
            if html or as_json:
                from flowrun.launcher.page.make_page import plan_page, write_page
                from flowrun.launcher.terminal.as_json import to_json

                page = plan_page(planned.job)
                said = write_page(page, html) if html else ""
                text = to_json(page) if as_json else f"{text}\n{said}"
        doing.clear()
        typer.echo(text)


@app.command()
def verify(
    overrides: shared.Overrides = None,
    config_dir: shared.ConfigDir = None,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    """Check that a recipe trains alike under every layout.

    A few steps under single, data, tensor, stages, hybrid and ZeRO layouts, then
    one table of loss and weight differences.  On the virtual cluster;
    launch=local uses processes.

      flowrun verify recipe=gpt_hybrid train.steps=5
    """
    given = overrides or []
    with shared.show_errors(given, config_dir):
        chosen = any(text.startswith("launch") for text in given)
        recipe = shared.load_recipe(given if chosen else [*given, "launch=virtual"], config_dir)
        from flowrun.launcher.run import verify as verify_layouts

        found = verify_layouts(recipe)
        if form is shared.Format.json:
            shared.print_found(found, form)
        else:
            doing.clear()
            _print_rows(found.rows)
            typer.echo(found.caption)
        if not all(row.ok for row in found.rows):
            raise typer.Exit(RUN_FAILED)


@app.command()
def resume(
    run_folder: shared.RunFolder,
    overrides: shared.KeyChanges = None,
    step: shared.OfStep = None,
    best: shared.Best = False,
    config_dir: shared.ConfigDir = None,
) -> None:
    """Continue a run from its last checkpoint, in its folder.

    A run saves checkpoints with train.save_every=N.  KeyChanges of placement,
    zero, sbp, launch, optim and of train.steps are welcome; model, data, seed and
    batch size stay.

      flowrun resume outputs/2026-01-31/12-00-00_gpt_tiny
      flowrun resume RUN_DIR train.steps=400 placement.axes.tensor=1 zero.stage=0
      flowrun resume RUN_DIR --best
    """
    given = overrides or []
    with shared.open_run(run_folder, given, config_dir, step, best, continues=True) as folder:
        from flowrun.launcher.command_line.seats import take_seat

        take_seat([f"recipe={folder / 'recipe.yaml'}", *given], config_dir)
        from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed

        start = checkpoint_of(folder, step, best)
        store = [f"train.store={run_folder}"] if is_url(run_folder) else []
        recipe = compose_resumed(start, [*store, *given], config_dir)
        from flowrun.launcher.report.progress import Progress
        from flowrun.launcher.run import run as run_recipe

        run_recipe(recipe, folder, Progress(), start)


def _print_rows(rows: Sequence[Difference]) -> None:
    """A table of dataclasses: their fields are the columns."""
    from flowrun.launcher.terminal.console import plain_table, wide_console

    names = [field.name for field in fields(rows[0])] if rows else []
    headings = [name.replace("_", " ") for name in names]
    cells = (
        [f"{x:.2e}" if isinstance(x, float) else str(x) for x in map(row.__getattribute__, names)]
        for row in rows
    )
    table = plain_table("", headings, cells, whole=headings[:-1])
    wide_console().print(table)
