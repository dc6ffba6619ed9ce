"""A recipe has one plan: `flowrun plan`, a suite of published tables, a run and `flowrun verify`
make it alike, to the digit.

A case is a function of its seed.  CI tries a few; `--thorough` tries 200.
"""

import io
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import FlowrunError
from flowrun.launcher import run as story
from flowrun.launcher.bench.foreseen.foresee import foresee
from flowrun.launcher.bench.foreseen.published import parse
from flowrun.launcher.commands.verify import compare_layouts
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from support.checks.thorough import few

FEW, MANY = 1, 200
TEXT = "model.depth=2 data.length=32 data.max_bytes=100000"
MODELS = {
    "gpt_dp": TEXT,
    "gpt_tp": f"{TEXT} model.dropout=0.1",
    "gpt_hybrid": f"{TEXT} model.dropout=0.1",
    "bert_dp": "model.depth=1 data.source.max_bytes=100000",
    "moe_ep": "",
    "mlp_hybrid": "",
    "convnet_dp": "",
    "wide_deep": "data.samples=1024",
}
# key -> values; an empty one leaves the key as it is
KEYS = {
    "hardware": " cpu h100 dgx_a100 v100_cluster",
    "precision.dtype": " fp32 bf16 fp16",
    "precision.attention": " auto fp32 narrow",
    "precision.accumulate_dtype": " null",
    "engine.attention": " fused products",
    "engine.keeps_logits": " true false",
    "engine.pad_classes": " always never",
    "engine.overwrites": " false",
    "engine.blocking": " [data]",
    "engine.compiler": " inductor",
    "placement.axes.data": " 1 2 4",
    "placement.axes.tensor": " 1 2",
    "placement.stages": " 1 2",
    "placement.in_flight": " gpipe 1f1b zero_bubble",
    "train.batch_size": " 32 64",
    "train.micro_batches": " 1 2 4",
    "train.epochs": " 1",
    "zero": " {axis:data,stage:1} {axis:data,stage:2} {axis:data,stage:3}",
    "recompute.modules": " ['*']",
    "optim": " sgd lion",
    "launch.data_workers": " 1",
}
CHANGED = 5  # keys of a case
QUICK = ("engine.check_capture=false", "eval.batches=0")  # neither is of the training plan


def overrides_of(chance: random.Random) -> list[str]:
    recipe = chance.choice(list(MODELS))
    keys = {key: chance.choice(KEYS[key].split(" ")) for key in chance.sample(list(KEYS), CHANGED)}
    changes = [f"{key}={value}" for key, value in keys.items() if value]
    return [f"recipe={recipe}", *MODELS[recipe].split(), *QUICK, *changes]


def planned_case(seed: int) -> tuple[list[str], Rehearsed]:
    """The first recipe of a seed that can be planned, and its plan by `flowrun plan`."""
    chance = random.Random(seed)
    while True:
        overrides = overrides_of(chance)
        try:
            return overrides, story.plan(load(overrides)).training
        except FlowrunError:
            continue


@dataclass
class Planned(Exception):
    """Ends a run once it has its plan."""

    training: Rehearsed


def _end(job: Job, training: Rehearsed, ranks: int) -> None:
    raise Planned(training)


def own_plan(recipe: Recipe, folder: Path) -> Rehearsed:
    with pytest.raises(Planned) as end:
        story.run(recipe, folder)
    return end.value.training


def verified_plan(recipe: Recipe, folder: Path) -> Rehearsed:
    """Of the first layout, which is the recipe's own."""
    with pytest.raises(Planned) as end:
        compare_layouts(recipe, story.run)
    return end.value.training


def figures_of(overrides: list[str], folder: Path) -> list[float | None]:
    recipe, *changes = overrides
    table = {
        "title": "A recipe",
        "source": "nobody",
        "recipe": recipe.removeprefix("recipe="),
        "overrides": changes,
        "columns": ["step_ms", "memory_gib"],
        "rows": {"mine": [1.0, 1.0]},
    }
    bounds = {"rank_at_least": 0.0, "error_at_most": 1.0}
    suite = parse({"name": "mine", "note": "", "tables": {"mine": table}, **bounds})
    return [line.foreseen for line in foresee(suite, folder, Console(file=io.StringIO()))]


@pytest.mark.parametrize("seed", few(range(MANY), range(FEW)))
def test_all_plans_of_a_recipe_are_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are kept on disk by what they are made of, so that one made of something else is made
    again, and compared.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(story, "check_limits", _end)
    overrides, planned = planned_case(seed)
    foreseen = planned.rehearsal
    step_ms, memory_gib = figures_of(overrides, tmp_path / "suite")
    assert step_ms == foreseen.step_s * 1e3, overrides
    assert memory_gib == max(foreseen.peak_bytes) / 2**30, overrides
    for make in (own_plan, verified_plan):
        other = make(load(overrides), tmp_path / make.__name__)
        assert str(other.plan) == str(planned.plan), (make.__name__, overrides)
        assert other.rehearsal == foreseen, (make.__name__, overrides)
    assert len(list((tmp_path / "cache").rglob("training-*.plan"))) == 1, overrides
