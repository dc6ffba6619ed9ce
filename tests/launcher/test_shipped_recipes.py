"""Every shipped recipe: a comment says what it shows, no op of it falls back, and its layout is the
least.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from flowrun.launcher.job import Job, Work
from flowrun.launcher.progress import units
from flowrun.launcher.recipe import load

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
ALL = pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)

# By model: less of the same.  Ops, and the layouts that there are for them, stay.
SMALLER = {
    "llama3": (
        "model.depth=2",
        "placement.stages=2",
        "placement.axes.data=2",
        "train.batch_size=8",
        "train.micro_batches=4",
        "data.length=256",
        "data.max_bytes=100000",
    ),
    "gpt3": (
        "model.depth=2",
        "placement.stages=2",
        "train.batch_size=24",
        "train.micro_batches=4",
        "data.max_bytes=100000",
    ),
    "gpt": ("model.depth=2", "data.max_bytes=100000"),
    "bert": ("model.depth=1", "data.source.max_bytes=100000"),
    "resnet": ("model.blocks=[1,1]",),
    "insightface": ("model.blocks=[1,1]", "data.samples=2048"),
    "wide": ("data.samples=1024",),
}


@ALL
def test_a_recipe_begins_with_what_it_shows(recipe: Path) -> None:
    assert recipe.read_text().startswith("# ")


@cache
def small_job(recipe: Path) -> Job:
    model = recipe.stem.split("_")[0].rstrip("2")
    return Job(load([f"recipe={recipe}", *SMALLER.get(model, ())]), values=False)


@ALL
def test_no_op_of_a_recipe_falls_back(recipe: Path) -> None:
    job = small_job(recipe)
    plans = [job.training, *([job.evaluation] if job.evaluation else [])]
    notes = [note for made in plans for note in made.plan.notes]
    assert [n for n in notes if "signature" in n or "proved" in n] == []


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("gpt_dp", Work("tokens", 32 * 64)),
        ("bert_dp", Work("tokens", 32 * 64)),
        ("resnet_dp", Work("samples", 32)),
        ("wide_deep", Work("samples", 256)),  # sets of ids, which have no order
    ],
)
def test_speed_counts_tokens_where_samples_are_sequences_of_them(name: str, work: Work) -> None:
    assert small_job(RECIPES[0].with_name(f"{name}.yaml")).work == work


def test_the_blocks_of_a_stage_are_those_whose_weights_it_has() -> None:
    """Dropout on attention needs a mask: block 0 makes it, and the second stage has a copy."""
    job = small_job(RECIPES[0].with_name("gpt2_3d.yaml"))
    assert any(op.module == "blocks.0.attn" and op.stage for op in job.training.plan.graph.ops)
    assert [units(job.training, stage) for stage in (0, 1)] == [
        "embed, blocks.0",
        "blocks.1, norm, head",
    ]
