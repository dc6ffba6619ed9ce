from pathlib import Path
from typing import Any

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands import verify
from flowrun.launcher.commands.verify import LayoutComparison, compare_layouts
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.run import run
from support.checks.thorough import few

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, drop=0.0, normed=False):
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 10)
        self.drop = nn.Dropout(drop)
        self.norm = nn.BatchNorm1d(32) if normed else nn.Identity()

    def forward(self, images):
        return self.b(self.drop(torch.relu(self.norm(self.a(images)))))


class Weighed(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target, self.centers = target, nn.Linear(10, 10)

    def forward(self, output, batch):
        return nn.functional.cross_entropy(self.centers(output), batch[self.target])
"""
RECIPE = """
defaults: [/data: digits, /optim: adamw, /launch: virtual]
model: {_target_: verified_nets.Net}
task: {loss: {_target_: flowrun.models.losses.cross_entropy, target: labels}}
placement: {axes: {data: 2}}
train: {batch_size: 16, micro_batches: 2, steps: 3}
"""
CLICKS = """
defaults: [/model: wide_deep, /data: clicks, /optim: adamw, /launch: virtual]
placement: {axes: {data: 2}}
model: {ids: 500, width: 4, hidden: [8]}
data: {samples: 200}
optim: {sparse: lazy}
train: {batch_size: 4, steps: 2}
"""


@pytest.fixture(autouse=True)
def few_layouts(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are enough here, and the nets are importable."""
    every = verify.layouts
    kept = ("as the recipe says", "data 2, ZeRO 2")
    monkeypatch.setattr(verify, "layouts", lambda recipe: _some(every(recipe), kept))
    (workplace / "verified_nets.py").write_text(NETS)


def _some(named: Any, kept: tuple[str, ...]) -> list[Any]:
    return [(name, changes) for name, changes in named if name in (*kept, verify.SINGLE)]


def recipe(*changes: str, text: str = RECIPE) -> Recipe:
    Path("mine.yaml").write_text(text)
    return load(["recipe=mine.yaml", *changes])


def verdicts(found: LayoutComparison) -> list[str]:
    return [row.verdict for row in found.rows]


CASES = {
    "dropout": (["model.drop=0.3"], "the layout single, not plain torch: the model draws random"),
    "batch norm of each rank": (
        ["view=mirrored", "model.normed=true", "optim=sgd"],
        "a plain torch loop over as many replicas",
    ),
    "a loss with weights": (["task.loss._target_=verified_nets.Weighed"], "a plain torch loop"),
    "bf16": (["precision.dtype=bf16"], "a plain torch loop"),
    "fp16, its scale constant": (["precision.dtype=fp16", "precision.loss_scale=512"], "a plain"),
    "fp16, all updates skipped": (
        ["precision.dtype=fp16", "precision.loss_scale=1e9", "train.steps=4"],
        "a plain torch loop",
    ),
    "a function, its scale constant": (
        ["precision.dtype=fp16", "precision.loss_scale=64", "optim=lion"],
        "a plain torch loop",
    ),
}


OF_A_KIND = ("fp16, its scale constant", "bf16")  # with others


@pytest.mark.parametrize("name", few(CASES, but=OF_A_KIND))
def test_every_layout_of_a_recipe_is_the_same(name: str) -> None:
    changes, beside = CASES[name]
    found = compare_layouts(recipe(*changes), run)
    assert verdicts(found) == ["same"] * 3, found
    assert found.caption.startswith(f"Compared with {beside}")


def test_lazy_tables_are_held_beside_one_rank() -> None:
    found = compare_layouts(recipe(text=CLICKS), run)
    assert verdicts(found) == ["same"] * 3, found
    assert "leaves rows alone that torch's optimizers change" in found.caption


def faster(factor: float) -> Any:
    """How to run a recipe with another rate than its own."""

    def run_faster(given: Recipe, folder: Path) -> Any:
        file = Path("faster.yaml")
        file.write_text(given.to_yaml())
        return run(load([f"recipe={file}", f"optim.lr={given.optim.lr * factor}"]), folder)

    return run_faster


OTHERS = {
    "fp32": ["precision.dtype=fp32"],
    "bf16": ["precision.dtype=bf16"],
    "fp16": ["precision.dtype=fp16"],
    "fp16, some skipped": ["precision.dtype=fp16", "precision.loss_scale=3e5", "train.steps=6"],
}


@pytest.mark.parametrize("name", few(OTHERS, ("bf16",)))
def test_another_training_differs(name: str) -> None:
    """Under every layout a rate that is a tenth larger than the recipe's."""
    found = compare_layouts(recipe(*OTHERS[name]), faster(1.1))
    assert verdicts(found) == ["DIFFERS"] * 3


@pytest.mark.thorough
def test_a_rate_that_is_one_in_ten_thousand_off_differs() -> None:
    """Without a reason, rounding is all that is allowed."""
    found = compare_layouts(recipe(), faster(1.0001))
    assert verdicts(found) == ["DIFFERS"] * 3
    assert "Allowed: losses 1e-06 relative, weights 1e-05 of" in found.caption


@pytest.mark.thorough
def test_a_recipe_that_amplifies_rounding_is_allowed_more_for_a_reason() -> None:
    """The gradient of a bias before batch norm is rounding alone, which Adam divides by itself."""
    found = compare_layouts(recipe("model.normed=true", "optim.eps=1e-12"), run)
    assert verdicts(found) == ["same"] * 3, found
    assert "(4 times what one unit in the last place of the initial weights" in found.caption


def test_dropout_in_the_mirrored_view_has_nothing_to_be_held_beside() -> None:
    with pytest.raises(RecipeError, match="draws random numbers") as error:
        compare_layouts(recipe("view=mirrored", "model.drop=0.3"), run)
    assert error.value.where == "view"
