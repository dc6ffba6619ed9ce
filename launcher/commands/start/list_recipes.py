"""flowrun recipes: the recipes, and what each shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrun.launcher.recipe.hydra_source import FOLDERS, describe, recipe_names


@dataclass(frozen=True, kw_only=True)
class ListedRecipe:
    """A recipe that can be run.  shows: the first line of its file."""

    name: str
    file: Path
    shows: str


@dataclass(frozen=True, kw_only=True)
class RecipeList:
    """All recipes that can be run by name: of ./recipes, $FLOWRUN_RECIPES and flowrun."""

    recipes: tuple[ListedRecipe, ...]


def list_recipes() -> RecipeList:
    """Find the recipes."""
    found = recipe_names().items()
    return RecipeList(
        recipes=tuple(ListedRecipe(name=k, file=file, shows=describe(file)) for k, file in found)
    )


def show_recipes(found: RecipeList) -> None:
    """Print a line for each."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for each in found.recipes:
        table.add_row(each.name, each.shows)
    console = Console()
    console.print(table)
    console.print(
        f"Run one with flowrun recipe=NAME; ./recipes and the folders in ${FOLDERS} add more.",
        style="dim",
    )
