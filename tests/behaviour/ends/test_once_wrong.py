"""Recipes that once made a wrong plan, or an error in the wrong place."""

import math
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.verify import _relative
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import verify

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(64, 32), nn.Dropout(drop), nn.Linear(32, 10)

    def forward(self, images):
        return self.b(self.drop(torch.relu(self.a(images))))
"""
RECIPE = """
defaults: [/data: digits, /optim: adamw, /launch: virtual]
model: {_target_: review_nets.Net}
task: {loss: {_target_: flowrun.models.losses.cross_entropy, target: labels}}
placement: {axes: {data: 2, tensor: 2}}
sbp:
  a.weight: {tensor: S(0)}
  b.weight: {tensor: S(1)}
zero: {axis: data, stage: 1, min_size: 8}
train: {batch_size: 16, micro_batches: 2, steps: 3}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "review_nets.py").write_text(NETS)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return f"recipe={tmp_path / 'r.yaml'}"


@pytest.mark.thorough
def test_a_sharded_bias_that_becomes_partial_is_gathered_once_a_step(recipe: str) -> None:
    rows = verify(load([recipe])).rows
    assert [row.verdict for row in rows] == ["same"] * len(rows)


def test_a_loss_that_is_no_scalar_is_refused_before_the_start(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"task.loss\n.*shape \(8, 10\) instead of one number"):
        _ = Job(load([recipe, "task.loss=null"])).training


def test_a_loss_that_is_no_number_differs() -> None:
    assert _relative(math.nan, 1.0) == math.inf
    assert _relative(1.0, math.nan) == math.inf
