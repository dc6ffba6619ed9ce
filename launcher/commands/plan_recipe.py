"""What a recipe will do, without doing it: `flowrun plan`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flowrun.engine.compile import Rehearsed
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.listeners.make import make_listeners
from flowrun.launcher.place.settle import settle
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
    """

    recipe: Recipe
    training: Rehearsed
    text: str

    def __str__(self) -> str:
        return self.text


def plan(recipe: Recipe, overrides: Sequence[str] = (), save: Path | None = None) -> Planned:
    """Show what a recipe will do: stages, layers, boxings, memory, time; first the candidates, if
    it asks to be placed.  Nothing is started.

    overrides: what the recipe was composed from.  save: where to write the placed recipe.
    """
    make_listeners(recipe)  # a run would refuse them, too
    recipe = with_steps(recipe)
    terminal, width = sys.stdout.isatty(), output_width()
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    with console.capture() as text:
        planned = None
        if recipe.auto.placement:
            from flowrun.launcher.place.place import place
            from flowrun.launcher.place.show_placements import table

            placed = place(recipe)
            recipe, planned = placed.recipe, placed.training
            console.print(table(placed.found), "")
            if save:
                from flowrun.launcher.place.saved import save as write

                write(placed, list(overrides), save)
        job = Job(recipe, values=False, planned=planned)
        console.print(plan_report(job, width))
        if save and planned:
            console.print(f"the recipe is saved: flowrun recipe={save}", soft_wrap=True)
    shown = text.get().rstrip()
    return Planned(recipe=recipe, training=job.training, text=shown)


def plan_level(recipe: Recipe, level: str) -> str:
    """Show one level of the compiler as text (report/show_level.py).  Nothing is started.

    Raises RecipeError for an unknown level, and as `plan` does.
    """
    from flowrun.launcher.report.show_level import check_level, level_report

    check_level(level)
    recipe, planned = settle(with_steps(recipe))
    return level_report(Job(recipe, values=False, planned=planned), level)
