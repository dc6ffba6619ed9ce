"""optim.groups freezes parameters: they stay, and take no state and no gradient."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import instantiate_loss, instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.run import run


def recipe(groups: dict[str, Any], *overrides: str) -> Recipe:
    common = ("launch=virtual", "engine.cache=false", "train.steps=2", "eval.fraction=0")
    found: Recipe = load(["recipe=gpt_dp", *common, *overrides])
    return replace(found, optim=replace(found.optim, groups=groups))


@pytest.mark.parametrize("zero", [pytest.param("0", marks=pytest.mark.thorough), "3"])
def test_frozen_parameters_stay_and_take_no_state(tmp_path: Path, zero: str) -> None:
    given = recipe({"blocks.0.*": {"frozen": True}}, f"zero.stage={zero}")
    before = {name: p.clone() for name, p in instantiate_model(given).named_parameters()}
    run(given, tmp_path)
    after = load_file(tmp_path / "weights.safetensors")
    frozen = {name for name in before if name.startswith("blocks.0.")}
    same = {name for name, value in before.items() if torch.equal(after[name], value)}
    assert frozen and same == frozen
    variables = Job(given).training.plan.graph.variables
    assert not [v.name for v in variables if v.kind == "state" and v.of in frozen]


def test_a_later_pattern_thaws() -> None:
    given = recipe({"blocks.*": {"frozen": True}, "blocks.1.*": {"frozen": False, "lr": 0.1}})
    model = instantiate_model(given)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in trained if name.startswith("blocks.")} == {"1"}
    assert [group.pattern for group in Job(given).strategy.optimizer.groups] == ["blocks.1.*"]


def test_parameters_of_a_loss_are_frozen_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "frozen_scale.py").write_text(
        "from torch import nn\n"
        "class Scaled(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.last = nn.Linear(2, 2)\n"
    )
    given = recipe({"task.loss.last.*": {"frozen": True}, "task.loss.last.bias": {"frozen": False}})
    given = replace(given, task=replace(given.task, loss={"_target_": "frozen_scale.Scaled"}))
    loss = instantiate_loss(given)
    assert isinstance(loss, nn.Module)
    assert [name for name, p in loss.named_parameters() if p.requires_grad] == ["last.bias"]
    instantiate_model(given)
    wrong = recipe({"task.loss.first.*": {"frozen": True}})
    wrong = replace(wrong, task=given.task)
    instantiate_model(wrong)
    with pytest.raises(
        RecipeError, match=r"'task.loss.first.\*' matches no parameter of this loss"
    ):
        instantiate_loss(wrong)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"blcks.*": {"frozen": True}}, "'blcks.*' matches no parameter"),
        ({"blocks.*": {"frozen": 3}}, "3 is not true or false"),
    ],
)
def test_a_wrong_group_is_refused(groups: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=r"optim\.groups") as refused:
        Job(recipe(groups))
    assert said in str(refused.value)
