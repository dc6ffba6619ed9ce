"""Every shipped recipe: a comment says what it shows, no op of it falls back, and its layout is the
least.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
ALL = pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)

# By model: less of the same.  Ops, and the layouts that there are for them, stay.
SMALLER = {
    "gpt": ("model.depth=2", "data.max_bytes=100000"),
    "bert": ("model.depth=1", "data.source.max_bytes=100000"),
    "resnet": ("model.blocks=[1,1]",),
    "insightface": ("model.blocks=[1,1]", "data.samples=2048"),
    "wide": ("data.samples=1024",),
}


@ALL
def test_a_recipe_begins_with_what_it_shows(recipe: Path) -> None:
    assert recipe.read_text().startswith("# ")


@ALL
def test_no_op_of_a_recipe_falls_back(recipe: Path) -> None:
    model = recipe.stem.split("_")[0].rstrip("2")
    job = Job(load([f"recipe={recipe}", *SMALLER.get(model, ())]))
    plans = [job.training, *([job.evaluation] if job.evaluation else [])]
    notes = [note for made in plans for note in made.plan.notes]
    assert [n for n in notes if "signature" in n or "proved" in n] == []
