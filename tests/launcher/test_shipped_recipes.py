"""Every shipped recipe: a comment says what it shows, and no op of it falls back."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
ALL = pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)


@ALL
def test_a_recipe_begins_with_what_it_shows(recipe: Path) -> None:
    assert recipe.read_text().startswith("# ")


@ALL
def test_no_op_of_a_recipe_falls_back(recipe: Path) -> None:
    job = Job(load([f"recipe={recipe}"]))
    plans = [job.training, *([job.evaluation] if job.evaluation else [])]
    assert [note for made in plans for note in made.plan.notes if "signature" in note] == []
