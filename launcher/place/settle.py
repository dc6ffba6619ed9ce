"""A recipe as it will run: where it asks to be placed, with the placement that a search chose."""

from __future__ import annotations

from flowrun.engine.compile import Rehearsed
from flowrun.launcher.job.forked import run_in_fork
from flowrun.launcher.recipe.device import forks_autograd
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.report.progress import Progress


def settle(recipe: Recipe, progress: Progress | None = None) -> tuple[Recipe, Rehearsed | None]:
    """Return the recipe as it will run, with its plan if flowrun has placed it."""
    if not recipe.auto.placement:
        return recipe, None
    from flowrun.launcher.place.place import place  # takes 0.4 s
    from flowrun.launcher.place.show_placements import summary

    placed = run_in_fork(lambda: place(recipe)) if forks_autograd() else place(recipe)
    if progress:
        progress.console.print(summary(placed.found), highlight=False, markup=False)
    return placed.recipe, placed.training
