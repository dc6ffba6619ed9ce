"""The shipped recipes, made smaller: ops, and the layouts that there are for them, stay."""

from functools import cache
from pathlib import Path

from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

RECIPES = sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*.yaml"))

# By model: less of the same.
_SHORT = "data.max_bytes=100000"
SMALLER = {
    "llama3": (
        *("model.depth=2", "placement.stages=2", "placement.axes.data=2", _SHORT),
        *("train.batch_size=8", "train.micro_batches=4", "data.length=256"),
    ),
    "gpt3": (
        *("model.depth=2", "placement.stages=2", _SHORT),
        *("train.batch_size=24", "train.micro_batches=4"),
    ),
    "gpt": ("model.depth=2", _SHORT),
    "gpt_long": ("model.depth=2", _SHORT, "data.length=128"),
    "bert": ("model.depth=1", "data.source.max_bytes=100000"),
    "resnet": ("model.blocks=[1,1]",),
    "insightface": ("model.blocks=[1,1]", "data.samples=2048"),
    "wide": ("data.samples=1024",),
}


def overrides_of(recipe: Path) -> tuple[str, ...]:
    kind = recipe.stem.split("_")[0].rstrip("2")
    return SMALLER.get(recipe.stem, SMALLER.get(kind, ()))


@cache
def small_job(recipe: Path, *overrides: str) -> Job:
    """Planned, not run: weights have no values."""
    return Job(load([f"recipe={recipe}", *overrides_of(recipe), *overrides]), values=False)
