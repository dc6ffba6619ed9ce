"""Every shipped recipe: a comment says what it shows, no op of it falls back, and its layout is the
least.
"""

import json
from pathlib import Path

import pytest

from flowrun.engine.ir.sbp import S
from flowrun.launcher.job.job import Job, WorkUnit
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.progress import units
from support.pinned_plans import PINNED, TORCH, digest, texts
from support.plans.small_recipes import RECIPES, small_job

ALL = pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)


@ALL
def test_no_op_of_a_recipe_falls_back(recipe: Path) -> None:
    job = small_job(recipe)
    plans = [plan for plan in job.plans.compiled if plan]
    notes = [note for made in plans for note in made.plan.notes]
    assert [n for n in notes if "signature" in n or "not proved" in n] == []


@ALL
def test_a_recipe_has_the_plans_that_are_pinned(recipe: Path) -> None:
    """python tests/support/pinned_plans.py --texts FOLDER writes them out, to see what differs."""
    everything = json.loads(PINNED.read_text())
    if everything["torch"] != TORCH:
        pytest.skip(f"pinned with torch {everything['torch']}")
    pinned = everything[recipe.stem]
    found = {kind: digest(text) for kind, text in texts(small_job(recipe)).items()}
    assert found == {kind: value for kind, value in pinned.items() if kind != "losses"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("resnet_dp", "manual"),  # the weight gradient of a convolution takes the weight
        ("gpt2_2d", "auto"),  # weights are gathered in two steps
        ("wide_deep", "auto"),
    ],
)
def test_the_weights_of_a_recipe_can_be_sharded(name: str, layout: str) -> None:
    """Planning rehearses a step: a plan that would wait for itself is not made."""
    keys = ("zero.stage=3", f"parallel={layout}", "engine.cache=false")
    assert small_job(RECIPES[0].with_name(f"{name}.yaml"), *keys).training.plan.graph.ops


@pytest.mark.parametrize("name", ["resnet_dp", "convnet_dp"])
@pytest.mark.parametrize("hardware", ["cpu", "v100_cluster"])
def test_an_axis_named_data_divides_the_samples(name: str, hardware: str) -> None:
    """Though to sum the first convolution's channels, and to compute all else on every rank, would
    take fewer messages than batch norm over the whole batch does.
    """
    given = [f"recipe={name}", f"hardware={hardware}", "placement.axes.data=2"]
    graph = Job(load([*given, "engine.cache=false"]), values=False).training.plan.graph
    ops = [op for op in graph.ops if op.target == "aten.convolution.default"]
    assert ops
    assert {op.in_sbp[0] for op in ops} == {(S(0),)}


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("gpt_dp", WorkUnit("tokens", 32 * 64)),
        ("bert_dp", WorkUnit("tokens", 32 * 64)),
        ("resnet_dp", WorkUnit("samples", 32)),
        ("wide_deep", WorkUnit("samples", 256)),  # sets of ids, which have no order
    ],
)
def test_speed_counts_tokens_where_samples_are_sequences_of_them(name: str, work: WorkUnit) -> None:
    assert small_job(RECIPES[0].with_name(f"{name}.yaml")).work == work


def test_the_blocks_of_a_stage_are_those_whose_weights_it_has() -> None:
    """Dropout on attention needs a mask: block 0 makes it, and the second stage has a copy."""
    job = small_job(RECIPES[0].with_name("gpt2_3d.yaml"))
    assert any(op.module == "blocks.0.attn" and op.stage for op in job.training.plan.graph.ops)
    expected = ["embed, blocks.0", "blocks.1, norm, head"]
    assert [units(job.training, stage) for stage in (0, 1)] == expected
