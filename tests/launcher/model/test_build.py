from pathlib import Path
from typing import Any

import pytest
import torch

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.build import describe_model, task_inputs
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.run import run
from flowrun.launcher.store.weight_files import load as load_weights

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, {arguments}):
        return self.a(image)

def parallel():
    return nn.DataParallel(torch.compile(Net()))

def distributed():
    return nn.parallel.DistributedDataParallel(Net())

def traced():
    return torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4))

def within():
    return nn.Sequential(nn.Linear(64, 4), torch.jit.script(nn.Linear(4, 10)))

def parts(wraps=True):
    parts = [nn.Linear(64, 4), nn.Linear(4, 10)]
    if wraps:
        parts = [nn.DataParallel(parts[0]), torch.compile(parts[1])]
        parts[0].device_ids = [0, 1]  # as on a host of GPUs
    return nn.Sequential(*parts)

class Quiet(nn.parallel.DistributedDataParallel):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

def processes():
    return nn.Sequential(Quiet(nn.Linear(64, 4)), nn.Linear(4, 10))

class Bare(nn.Module):
    pass
"""

PARTS = """
defaults: [/data: digits, /optim: sgd, /launch: virtual]
model: {{_target_: {}.parts}}
task:
  inputs: {{input: images}}
  loss: {{_target_: flowrun.models.losses.cross_entropy, target: labels}}
train: {{steps: 3}}
placement: {{axes: {{data: 2}}}}
log: []
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    name = tmp_path.name.replace("-", "_")

    def make(made_by: str, arguments: str = "image") -> Recipe:
        (tmp_path / f"{name}.py").write_text(MODELS.format(arguments=arguments))
        words = ["recipe=mlp_data_parallel", "~model", f"+model._target_={name}.{made_by}"]
        return load(words)

    return make


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_the_module_inside_a_wrapper_is_trained_and_noted(recipe: Any) -> None:
    made = describe_model(recipe("parallel"))
    assert {name for name, _ in made.model.named_parameters()} == {"a.weight", "a.bias"}
    assert [note.split()[1] for note in made.notes] == ["DataParallel", "OptimizedModule"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_parts_of_a_model_train_as_those_that_are_not(recipe: Any, tmp_path: Path) -> None:
    recipe("parts")
    (tmp_path / "parts.yaml").write_text(PARTS.format(tmp_path.name.replace("-", "_")))
    found = []
    for wraps in (True, False):
        run(load(["recipe=parts.yaml", f"model.wraps={wraps}"]), tmp_path / str(wraps))
        found.append([*load_weights(tmp_path / str(wraps)).values()])
    assert len(found[0]) == 4
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    notes = describe_model(recipe("parts")).notes
    assert notes[0].startswith("the DataParallel at 0 does nothing")


def test_a_part_that_waits_for_other_processes_does_nothing(recipe: Any) -> None:
    made = describe_model(recipe("processes"))
    assert made.notes[0].startswith("the Quiet at 0 does nothing")
    assert type(made.model.get_submodule("0")) is torch.nn.DataParallel


def test_a_wrapper_that_needs_processes_is_refused_at_its_line(recipe: Any) -> None:
    with pytest.raises(RecipeError, match=r"return nn\.parallel\.DistributedDataParallel"):
        describe_model(recipe("distributed"))


@pytest.mark.parametrize(("made_by", "whose"), [("traced", "the model"), ("within", "module 1")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torchscript_is_refused_by_its_name(
    made_by: str, whose: str, recipe: Any
) -> None:
    with pytest.raises(RecipeError, match=f"{whose} is a ScriptModule .* made of Linear") as error:
        describe_model(recipe(made_by))
    assert "Name the class itself, Linear" in error.value.instead


@pytest.mark.parametrize(
    ("made_by", "arguments", "problem", "instead"),
    [
        (
            "Net",
            "batch",
            r"argument 'batch' of forward \(.*:10\).* not passed",
            "self, image, label",
        ),
        ("Net", "batch, more", r"nothing feeds .* argument 'batch' of forward \(", "Map it"),
        ("Net", "batch=None", "nothing feeds the model's argument 'batch'", "Map it"),
        ("Net", "*args", r"no argument of forward \(.*:10\) of Net has a name", "Name them after"),
        ("Net", "**options", "of Net has a name", r"or name those of **kwargs here"),
        ("Bare", "", "Bare has no forward", "image, label"),
    ],
)
def test_arguments_that_nothing_feeds_are_named_with_their_line(
    made_by: str, arguments: str, problem: str, instead: str, recipe: Any
) -> None:
    made = recipe(made_by, arguments)
    item = {"image": torch.zeros(64), "label": torch.zeros(())}
    with pytest.raises(RecipeError, match=problem) as error:
        task_inputs(made, describe_model(made).model, item)
    assert error.value.where == "task.inputs"
    assert instead in error.value.instead
