"""flowrun check: compose recipes and check their keys, without torch and without their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrun.engine.errors import FlowrunError
from flowrun.engine.ir.placement import BATCH_AXES, divide_samples
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.hydra_source import GROUP, recipe_names
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import explain


@dataclass(frozen=True, kw_only=True)
class CheckedRecipe:
    """A recipe, by name or file, and what is wrong with it.

    problem: its place, the facts and what to write instead; empty if it is right.
    """

    recipe: str
    problem: str

    def __str__(self) -> str:
        return self.problem or f"{self.recipe}: right"


@dataclass(frozen=True, kw_only=True)
class CheckedRecipes:
    """The recipes that `flowrun check` has composed."""

    recipes: tuple[CheckedRecipe, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.recipes))

    @property
    def right(self) -> bool:
        """Return whether all recipes compose."""
        return not any(each.problem for each in self.recipes)


def check_recipes(words: Sequence[str], config_dir: str | None = None) -> CheckedRecipes:
    """Check recipes.

    words: names and files of recipes, also as recipe=NAME, and key=value for each of them; without
    a recipe all that `flowrun recipes` lists.  config_dir: the user's own groups.
    """
    sign = f"{GROUP}="
    changes = [word for word in words if "=" in word and not word.startswith(sign)]
    named = [word.removeprefix(sign) for word in words if word not in changes]
    return CheckedRecipes(
        recipes=tuple(_check(each, changes, config_dir) for each in named or recipe_names())
    )


def _check(name: str, changes: Sequence[str], config_dir: str | None) -> CheckedRecipe:
    words = [f"{GROUP}={name}", *changes]
    try:
        _check_samples(load(words, config_dir))
    except FlowrunError as error:
        return CheckedRecipe(recipe=name, problem=explain(error, words, config_dir))
    return CheckedRecipe(recipe=name, problem="")


def _check_samples(recipe: Recipe) -> None:
    """Check that micro-batches divide over the ranks of an axis of the batch, as the first pass of
    a plan does, unless a search places the ranks or the recipe pins fields of the batch.
    """
    if recipe.auto.placement or any(key.startswith("batch") for key in recipe.sbp):
        return
    samples = recipe.micro_batch_size
    for axis, parts in recipe.stages[0].placement.axes:
        if axis in BATCH_AXES:
            samples = divide_samples(axis, samples, parts)
