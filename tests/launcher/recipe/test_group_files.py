"""Files of a user's own groups may name what they make by _target_: optim, schedule, data."""

from pathlib import Path

import pytest

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run

FILES = {
    "mine.py": """
import torch
from torch.utils.data import Dataset


def lion(param, grad, exp_avg, *, lr, beta1=0.9, beta2=0.99):
    direction = (beta1 * exp_avg + (1 - beta1) * grad).sign()
    return param - lr * direction, beta2 * exp_avg + (1 - beta2) * grad


def saw(step, period):
    return 1 - step % period / period


class Items(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, k):
        x = torch.randn(64, generator=torch.Generator().manual_seed(k))
        return {"x_BI": x, "labels": k % 10}
""",
    "conf/optim/own.yaml": "{_target_: mine.lion, lr: 2e-3, beta1: 0.95, clip_norm: 1.0}",
    "conf/optim/rms.yaml": "{_target_: torch.optim.RMSprop, lr: 3e-3, alpha: 0.8}",
    "conf/optim/base.yaml": "{defaults: [rms], _target_: torch.optim.RMSprop, momentum: 0.5}",
    "conf/optim/schedule/saw.yaml": "{_target_: mine.saw, period: 4}",
    "conf/data/items.yaml": "{_target_: mine.Items, samples: 40}",
    "recipe.yaml": """
defaults: [/model: mlp, /data: items, /optim: own, /optim/schedule: saw, /launch: virtual]
task: {inputs: {x_BI: x_BI}}
train: {steps: 5, batch_size: 8}
log: []
""",
    "own.yaml": """
defaults: [/model: mlp, /data: items, /launch: virtual]
optim: {_target_: mine.lion, lr: 1e-3, beta2: 0.5}
""",
}


@pytest.fixture(autouse=True)
def files(workplace: Path) -> None:
    for name, text in FILES.items():
        (workplace / name).parent.mkdir(parents=True, exist_ok=True)
        (workplace / name).write_text(text)


def test_a_run_of_own_groups_trains(workplace: Path) -> None:
    recipe = load(["recipe=recipe.yaml"], "conf")
    assert recipe.optim.update == {"_target_": "mine.lion", "beta1": 0.95}
    assert (recipe.optim.lr, recipe.optim.clip_norm) == (2e-3, 1.0)
    assert recipe.optim.schedule == {"_target_": "mine.saw", "period": 4}
    assert recipe.data == {"_target_": "mine.Items", "samples": 40}
    run(recipe, workplace / "out")
    again = load(["recipe=out/recipe.yaml"])
    assert (again.optim, again.data) == (recipe.optim, recipe.data)


RMS = {"_target_": "torch.optim.RMSprop"}


@pytest.mark.parametrize("file", ["recipe.yaml", "own.yaml"])
@pytest.mark.parametrize(
    ("words", "update", "lr"),
    [
        (["optim=rms"], {**RMS, "alpha": 0.8}, 3e-3),
        (["optim=rms", "optim.alpha=0.5"], {**RMS, "alpha": 0.5}, 3e-3),
        (["optim=base"], {**RMS, "alpha": 0.8, "momentum": 0.5}, 3e-3),
        (["optim=sgd"], {}, None),
    ],
)
def test_a_group_of_the_command_line_takes_the_place_of_the_recipes_own(
    file: str, words: list[str], update: dict[str, object], lr: float | None
) -> None:
    optim = load([f"recipe={file}", *words], "conf").optim
    assert optim.update == update
    assert file == "own.yaml" or lr in (None, optim.lr)
