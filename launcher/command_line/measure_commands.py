"""Commands that measure: bench, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrun.launcher.command_line import app as shared
from flowrun.launcher.command_line.app import app
from flowrun.launcher.terminal.exit_status import RUN_FAILED


@app.command()
def bench(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[suite=NAME] [suite.key=value] [key=value]…", show_default=False),
    ] = None,
    config_dir: shared.ConfigDir = None,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    r"""Train by flowrun and by torch's own layouts, in turn, and compare.

    [bold]suite=NAME[/] names what is compared (peers, paper …),
    [bold]suite.key=value[/] changes how; every other argument changes the
    recipes, of flowrun and of the peers.

      flowrun bench suite=peers
      flowrun bench suite=peers suite.rows=\[zero3,tensor] suite.rounds=5
      flowrun bench suite=auto suite.rows=\[gpt_small] suite.sweep.ranks=\[2]
      flowrun bench suite=peers precision.dtype=bf16 suite.loss_tolerance=2e-2
    """
    given = overrides or []
    with shared.show_errors(given, config_dir):
        from rich.console import Console

        from flowrun.launcher.bench.bench import bench as run_suite
        from flowrun.launcher.bench.foreseen.foresee import foresee
        from flowrun.launcher.bench.load_suite import list_suites, load_suite
        from flowrun.launcher.bench.results import BenchResult
        from flowrun.launcher.bench.suite import Suite
        from flowrun.launcher.terminal.console import wide_console

        if not any(text.startswith("suite=") for text in given):
            from flowrun.launcher.recipe.recipe_errors import CommandLineError

            there = f"Write suite=NAME; a suite takes minutes to an hour.\n{list_suites()}"
            raise CommandLineError("bench", "no suite is named.", there)
        suite, folder = load_suite(given, config_dir)
        as_json = form is shared.Format.json
        console = Console(stderr=True) if as_json else wide_console()
        if isinstance(suite, Suite):
            found = BenchResult(folder, measured=run_suite(suite, folder, console, config_dir))
        else:
            found = BenchResult(folder, foreseen=foresee(suite, folder, console, config_dir))
        if as_json:
            shared.print_found(found, form)
        if not found.holds:
            raise typer.Exit(RUN_FAILED)


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The profile to write.")] = Path(
        "profiles/hardware/mine.yaml"
    ),
    overrides: shared.Overrides = None,
    config_dir: shared.ConfigDir = None,
) -> None:
    """Measure this machine, and write a hardware profile (3 minutes).

    Products, convolutions, streams, and every collective between 2 and 4
    processes.  The file is one of the group [bold]hardware[/] of a folder of your
    own groups.  With a recipe its ops are timed too, each with its shapes; to a
    file that is there they are added:

      flowrun calibrate profiles/hardware/mine.yaml
      flowrun calibrate profiles/hardware/mine.yaml recipe=resnet_dp
      flowrun plan recipe=resnet_dp --config-dir profiles hardware=mine
    """
    given = overrides or []
    if "=" in str(file):  # FILE left out
        given, file = [str(file), *given], Path("profiles/hardware/mine.yaml")
    with shared.show_errors(given, config_dir):
        from flowrun.launcher.commands import calibrate as story
        from flowrun.launcher.commands.calibrate import show_ops, with_ops
        from flowrun.launcher.recipe.hardware_keys import load_shipped, of_file
        from flowrun.launcher.terminal.console import wide_console

        console = wide_console()
        recipe = shared.load_recipe(given, config_dir) if given else None
        if recipe is None or not file.exists():
            base = load_shipped("cpu")
            console.print("measuring this machine, which takes two to three minutes …", style="dim")
            found = story.calibrate(base, file.stem, story.THOROUGH, story.GROUPS)
            story.write(found.hardware, file)
            story.show(found, base, console)
        if recipe is not None:
            hardware = with_ops(of_file(file), [recipe])
            story.write(hardware, file)
            show_ops(hardware, console)
        typer.echo(f"{file}: {_usage(file)}")


def _usage(profile: Path) -> str:
    """Say how a recipe takes the profile."""
    folder = profile.absolute().parent
    if folder.name == "hardware" and profile.suffix == ".yaml":
        return f"--config-dir {profile.parent.parent} hardware={profile.stem}"
    return "recipes take it from FOLDER/hardware/NAME.yaml: --config-dir FOLDER hardware=NAME"
