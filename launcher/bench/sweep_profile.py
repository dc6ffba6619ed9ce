"""The profiles of a sweep: this machine, and the ops of each model on one rank and on most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flowrun.engine.cost.hardware import Hardware
from flowrun.launcher import calibrate
from flowrun.launcher.bench.suite import Suite
from flowrun.launcher.bench.sweep import candidates
from flowrun.launcher.calibrate_ops import with_ops
from flowrun.launcher.profile import shipped
from flowrun.launcher.recipe import load
from flowrun.launcher.schema import Recipe

NAME = "measured"


def measured_machine(console: Console) -> Hardware:
    """This machine, without ops of models."""
    console.print("measuring this machine …", highlight=False)
    machine = calibrate.calibrate(shipped("cpu"), NAME, calibrate.THOROUGH, calibrate.GROUPS)
    calibrate.say_if_busy(machine, console)
    return machine.hardware


def measured_ops(
    machine: Hardware, suite: Suite, name: str, folder: Path, console: Console
) -> tuple[Suite, str]:
    """The suite that foresees one row with what its ops take now, and the folder of that profile's
    group.  No step is timed: ops are, one by one.
    """
    console.print(f"measuring the ops of {name} …", highlight=False, markup=False)
    groups = folder / "profiles" / name
    found = with_ops(machine, list(recipes_timed(suite, name)))
    calibrate.write(found, groups / "hardware" / f"{NAME}.yaml")
    return replace(suite, overrides=(*suite.overrides, f"hardware={NAME}")), str(groups)


def recipes_timed(suite: Suite, name: str) -> Iterator[Recipe]:
    """Layouts without stages and ZeRO: these change no shapes."""
    assert suite.sweep is not None
    wanted = replace(suite.sweep, zero=(0,))
    given = suite.recipe_of(suite.experiments[name])
    recipe = load([*given, "auto.placement=true"])
    for ranks in (1, max(wanted.ranks)):
        for candidate in candidates(recipe, ranks, wanted):
            if candidate.branch.stages == 1:
                yield load([*given, *candidate.overrides])
