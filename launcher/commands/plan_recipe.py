"""What a recipe will do, without doing it: `flowrun plan`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from flowrun.engine.compile import Rehearsed
from flowrun.launcher.job.job import Job
from flowrun.launcher.listeners.make import make_listeners
from flowrun.launcher.place.settle import job_to_plan
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.report.show_plan import plan_report
from flowrun.launcher.terminal.console import output_width


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe's plan, before anything runs.

    Attributes:
        recipe: the recipe as it will run, with the placement that a search chose.
        training: the plan, and the rehearsal of a step (seconds, bytes).
        text: what `flowrun plan` prints.
        job: what was planned.
    """

    recipe: Recipe
    training: Rehearsed
    text: str
    job: Job = field(repr=False)

    def __str__(self) -> str:
        return self.text


def plan(recipe: Recipe, overrides: Sequence[str] = (), save: Path | None = None) -> Planned:
    """Show what a recipe will do: stages, layers, boxings, memory, time; first the candidates, if
    it asks to be placed.  Nothing is started.

    overrides: what the recipe was composed from.  save: where to write the placed recipe.
    """
    make_listeners(recipe)  # a run would refuse them, too
    terminal, width = sys.stdout.isatty(), output_width()
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)

    with console.capture() as text:
        job, placed = job_to_plan(recipe)
        if placed:
            from flowrun.launcher.place.saved import save as write
            from flowrun.launcher.place.show_placements import table

            console.print(table(placed.found), "")
            if save:
                write(placed, list(overrides), save)
        console.print(plan_report(job, width))
        if placed and save:
            console.print(f"the recipe is saved: flowrun recipe={save}", soft_wrap=True)
    found = text.get().rstrip()
    return Planned(recipe=job.recipe, training=job.training, text=found, job=job)


def plan_level(recipe: Recipe, level: str) -> str:
    """Show one level of the compiler as text (report/show_level.py).  Nothing is started.

    Raises RecipeError for an unknown level, and as `plan` does.
    """
    from flowrun.launcher.report.show_level import check_level, level_report

    check_level(level)
    return level_report(job_to_plan(recipe)[0], level)
