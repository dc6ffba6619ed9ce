from pathlib import Path
from typing import Any

import pytest
import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.passes.update.torch_update import TorchUpdate
from flowrun.launcher.job.optimizer import optimizer_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import ARGUMENTS, CHOICES

GROUP = Path(__file__).resolve().parents[3] / "conf" / "optim"


def test_every_optimizer_has_a_file_of_numbers() -> None:
    assert {*CHOICES["optim.name"]} == {file.stem for file in GROUP.iterdir()}


@pytest.mark.parametrize("name", CHOICES["optim.name"])
def test_a_file_of_numbers_gives_all_that_the_update_reads(name: str) -> None:
    made = optimizer_of(load(["model=mlp", "data=digits", f"optim={name}"]).optim, steps=1)
    assert made.name == name and len(made.arguments) > 1
    keys = {"betas" if key in ("beta1", "beta2") else key for key, _ in made.arguments}
    assert keys - {"lr"} <= {*ARGUMENTS}, "optim._target_ would not be given it"


# ---- optim._target_ ------------------------------------------------------------------------------

LION = "optim._target_=flowrun.models.optimizers.lion"
RMSPROP = """\
defaults: [/model: mlp, /data: digits]
optim: {_target_: torch.optim.RMSprop, lr: 0.1, alpha: 0.9, weight_decay: 0.2, clip_norm: 3}
"""


def recipe(folder: Path, text: str, *overrides: str) -> Recipe:
    (folder / "own.yaml").write_text(text)
    return load([f"recipe={folder / 'own.yaml'}", *overrides])


def test_a_class_takes_what_stands_beside_it(tmp_path: Path) -> None:
    made = optimizer_of(recipe(tmp_path, RMSPROP).optim, steps=1)
    numbers = dict(made.arguments)
    assert (made.name, made.clip_norm, numbers["lr"]) == ("rmsprop", 3.0, 0.1)
    assert (numbers["alpha"], numbers["weight_decay"], numbers["eps"]) == (0.9, 0.2, 1e-8)


def test_the_command_line_changes_its_arguments(tmp_path: Path) -> None:
    asked = ("optim.alpha=0.5", "optim.weight_decay=0", "optim.lr=1")
    found = recipe(tmp_path, RMSPROP, *asked)
    numbers = dict(optimizer_of(found.optim, steps=1).arguments)
    assert (numbers["alpha"], numbers["weight_decay"], numbers["lr"]) == (0.5, 0.0, 1.0)
    again = recipe(tmp_path, found.to_yaml(), "optim.momentum=0.25")  # as a resumed run has it
    again_numbers = dict(optimizer_of(again.optim, steps=1).arguments)
    assert again_numbers == {**numbers, "momentum": 0.25}
    assert optimizer_of(recipe(tmp_path, RMSPROP, "optim=sgd").optim, steps=1).name == "sgd"


@pytest.mark.parametrize(
    ("path", "fused"), [("torch.optim.AdamW", "adamw"), ("torch.optim.SGD", "sgd")]
)
def test_a_class_that_is_one_op_here_is_that_op(path: str, fused: str) -> None:
    words = ["model=mlp", "data=digits", f"optim._target_={path}", "optim.weight_decay=0.5"]
    made = optimizer_of(load(words).optim, steps=1)
    assert made.name == fused and made.function is None
    assert dict(made.arguments)["weight_decay"] == 0.5
    assert optimizer_of(load([*words, "optim.maximize=true"]).optim, steps=1).function is not None


WRONG = {
    "no such function": ([f"{LION}o"], "optim._target_", "has no 'liono'"),
    "a number that it needs": ([LION], "optim", "needs the number 'beta1'"),
    "a number that it has not": ([LION, "optim.beta3=1"], "optim.beta3", "takes no number"),
    "an argument that it has not": (
        ["optim._target_=torch.optim.RMSprop", "optim.alhpa=1"],
        "optim.alhpa",
        "takes no 'alhpa'",
    ),
    "no optimizer": (["optim._target_=torch.nn.Linear"], "optim._target_", "not a class derived"),
    "a value that it refuses": (
        ["optim._target_=torch.optim.SGD", "optim.nesterov=true"],
        "optim._target_",
        "Nesterov momentum requires",
    ),
    "arguments of nothing": (["optim.beta1=1"], "optim.beta1", "has no key 'beta1'"),
}


@pytest.mark.parametrize(("words", "where", "problem"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_a_located_error(words: list[str], where: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        optimizer_of(load(["model=mlp", "data=digits", *words]).optim, steps=1)
    assert error.value.where == where


def test_a_rate_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing says the rate") as error:
        recipe(tmp_path, RMSPROP.replace("lr: 0.1, ", ""))
    assert error.value.where == "optim.lr"


# ---- classes of packages -------------------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """As packages write it: counts and sums are Python numbers, of the state and of the group."""

    def __init__(self, params: Any, lr: float = 0.1, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "power": power, "k": 0, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            weight = group["k"] ** group["power"] * group["lr"]
            group["total"] += weight
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"], state["seen"] = p.clone(), 0
                state["seen"] += 1
                state["z"].sub_(p.grad, alpha=max(group["lr"], 0.05 / state["seen"]))
                p.lerp_(state["z"], weight / group["total"])


class Remembering(Counting):
    """Its state is a list."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("all", []).append(p.clone())


def test_a_class_of_a_package_keeps_numbers_as_states() -> None:
    function = TorchUpdate(Counting, (("power", 0.5),))
    assert {s.name: (s.start, s.shape) for s in function.states((4, 6))} == {
        "z": (None, (4, 6)),
        "total": (0.0, ()),
    }


def test_a_class_that_keeps_no_tensors_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="its state all is a list, and no tensor"):
        TorchUpdate(Remembering, ()).states((4, 6))
