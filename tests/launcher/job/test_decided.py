"""A run is refused where forward has decided by a buffer that has, or gets, another value."""

from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run

OWN = """
import os
import threading
import torch
from torch import nn
from torch.utils.data import Dataset

LOCK = threading.RLock()  # Dynamo stops there


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind
        self.register_buffer("count", torch.tensor(int(os.environ.get("COUNT", 5))))

    def forward(self, x_BI):
        with LOCK:
            h = self.layer(x_BI)
            if self.kind == "counts" and self.training:
                self.count += 1
                return h
            return h if self.count > 2 else -h


class Items(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, k):
        x = torch.randn(4, generator=torch.Generator().manual_seed(k))
        return {"x_BI": x, "labels": k % 3}
"""
RECIPE = """
defaults: [/optim: sgd, /launch: virtual]
model: {_target_: deciding.Net, kind: asks}
data: {_target_: deciding.Items}
task: {inputs: {x_BI: x_BI}, loss: {_target_: flowrun.models.losses.cross_entropy, target: labels}}
train: {steps: 2, batch_size: 8, save_every: 1}
log: []
"""


@pytest.fixture(autouse=True)
def files(workplace: Path) -> None:
    (workplace / "deciding.py").write_text(OWN)
    (workplace / "recipe.yaml").write_text(RECIPE)


def train(*overrides: str) -> None:
    run(load(["recipe=recipe.yaml", *overrides]), Path("out"))


def test_an_evaluation_may_not_ask_for_what_training_writes() -> None:
    with pytest.raises(RecipeError, match="the buffer count, into which training writes"):
        train("model.kind=counts")
    train("model.kind=counts", "eval.batches=0")


def test_a_resumed_run_has_the_value_by_which_forward_has_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train()
    start = checkpoint_of(Path("out"), None)
    run(compose_resumed(start, ["train.steps=3"]), Path("out"), start=start)
    start = checkpoint_of(Path("out"), None)
    other = compose_resumed(start, ["train.steps=4"])
    monkeypatch.setenv("COUNT", "1")
    with pytest.raises(RecipeError, match="forward decides by the buffer count"):
        run(other, Path("out"), start=start)
