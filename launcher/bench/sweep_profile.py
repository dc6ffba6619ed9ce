"""The profiles of a sweep: this machine, and the ops of each model on one rank and on most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from flowrun.engine.hardware.hardware import Hardware
from flowrun.launcher.bench.suite import Suite
from flowrun.launcher.bench.sweep import candidates
from flowrun.launcher.commands import calibrate
from flowrun.launcher.commands.calibrate_ops import OpTimes
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.hardware_keys import load_shipped
from flowrun.launcher.recipe.recipe import Recipe

NAME = "measured"
_TIMES = 2  # that ops are measured before each round
_STEPS = 4  # each time: more turns say more about a machine that others share than more steps do


def measured_machine(console: Console) -> Hardware:
    """This machine, without ops of models."""
    console.print("measuring this machine …", highlight=False)
    machine = calibrate.calibrate(load_shipped("cpu"), NAME, calibrate.THOROUGH, calibrate.GROUPS)
    calibrate.say_if_busy(machine, console)
    return machine.hardware


class Profile:
    """A profile that foresees one row: this machine, and the ops of the model.  Ops are measured
    again before every round, in turn with what they foresee: a machine that others share is slower
    in one minute than in the next.  No step is timed, only single ops.
    """

    def __init__(self, machine: Hardware, suite: Suite, name: str, folder: Path) -> None:
        self.name = name
        self.groups = folder / "profiles" / name
        self.suite = replace(suite, overrides=(*suite.overrides, f"hardware={NAME}"))
        self._times = OpTimes(
            machine, [Job(recipe) for recipe in recipes_to_time(suite, name)], _STEPS
        )

    def measure(self, console: Console) -> None:
        """Write the profile, of all that was measured so far, where `suite` finds it as a group of
        the folder `groups`.
        """
        console.print(f"measuring the ops of {self.name} …", highlight=False, markup=False)
        for _ in range(_TIMES):
            self._times.measure()
        calibrate.write(self._times.hardware, self.groups / "hardware" / f"{NAME}.yaml")


def recipes_to_time(suite: Suite, name: str) -> Iterator[Recipe]:
    """Yield layouts without stages and ZeRO, which change no shapes."""
    assert suite.sweep is not None
    wanted = replace(suite.sweep, zero=(0,))
    given = suite.recipe_of(suite.experiments[name])
    recipe = load([*given, "auto.placement=true"])
    for ranks in (1, max(wanted.ranks)):
        for candidate in candidates(recipe, ranks, wanted):
            if candidate.branch.stages == 1:
                yield load([*given, *candidate.overrides])
