import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.start.init_recipe import show_written, write_recipe
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import explain

MODULE = """
import torch
from torch import nn


class Part(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(8, width)

    def forward(self, x):
        return self.fc(x)


class Net(nn.Module):
    def __init__(self, width: int = {classes}):
        super().__init__()
        self.part = Part(width)

    def forward(self, {argument}, scale=None):
        return self.part({argument})


class Points:
    def __init__(self, count: int = 64):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, k):
        made = torch.Generator().manual_seed(k)
        x = torch.randn(8, generator=made)
        return {{"x": x, "{target}": {value}}}
"""


def module(
    place: Path,
    name: str,
    argument: str = "x",
    target: str = "y",
    value: str = "torch.tensor(k % 3)",
    classes: int = 3,
) -> None:
    text = MODULE.format(argument=argument, target=target, value=value, classes=classes)
    (place / f"{name}.py").write_text(text)


def test_a_recipe_of_a_module_compiles_with_nothing_to_fill_in(place: Path) -> None:
    module(place, "points_a", argument="features")
    written = write_recipe("points_a.py", None, None)
    assert (written.file, written.missing) == (Path("recipes/net.yaml"), [])
    assert written.notes == [
        "task.inputs.features is the field x",
        "task.loss is cross_entropy: y holds whole numbers 0 to 2, and forward returns "
        "3 logits for each",
    ]
    text = written.file.read_text()
    assert "# 64 items: x float32 8, y int64 scalar" in text and "# width: 3" in text
    recipe = load(["recipe=net"])
    assert recipe.task.inputs == {"features": "x"} and recipe.train.batch_size == 32
    assert recipe.task.loss and recipe.task.loss["target"] == "y"
    assert [*recipe.task.metrics] == ["accuracy"]
    assert Job(recipe, values=False).training.plan.num_ranks == 1


@pytest.mark.parametrize(
    ("name", "target", "value", "loss"),
    [
        ("points_b", "targets", "torch.tensor(k % 3)", "losses.cross_entropy}"),
        ("points_c", "y", "x[:3] * 2", "losses.squared_error, target: y}"),
        ("points_d", "y", "(x[:3] > 0).float()", "losses.binary_cross_entropy, target: y}"),
    ],
)
def test_the_loss_fits_the_field_that_is_left(
    place: Path, name: str, target: str, value: str, loss: str
) -> None:
    module(place, name, target=target, value=value)
    written = write_recipe(f"{name}.Net", None, place / "mine.yaml")
    assert loss in written.file.read_text() and not written.missing


def test_what_cannot_be_known_is_named(place: Path) -> None:
    module(place, "points_e")
    part = write_recipe("points_e.Part", None, None)
    assert part.missing == ["model.width"]
    out = io.StringIO()
    show_written(part, Console(file=out, width=80))
    assert "instead of ???: model.width" in out.getvalue()
    assert "flowrun plan recipe=part" in out.getvalue()
    alone = write_recipe("torch.nn.Linear", None, None)
    assert {"data._target_", "model.in_features", "task.inputs", "task.loss"} <= {*alone.missing}


def llama_folder(place: Path, *files: str, **config: Any) -> Path:
    """A folder of Hugging Face, `tiny`, with empty files beside its configuration."""
    folder = place / "tiny"
    folder.mkdir(exist_ok=True)
    said = {"architectures": ["LlamaForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(said))
    for file in files:
        (folder / file).write_text("{}")
    return folder


def test_a_folder_of_hugging_face_is_trained_on_text(place: Path) -> None:
    llama_folder(place)
    assert write_recipe("tiny", None, None).missing == ["data.tokenizer"]
    llama_folder(place, "tokenizer.json", "model.safetensors")
    again = write_recipe("tiny", None, Path("again.yaml"))
    assert again.missing == []
    recipe = load(["recipe=again.yaml"])
    assert recipe.weights == "tiny" and recipe.data["tokenizer"] == "tiny"
    assert recipe.model["_target_"] == "transformers.LlamaForCausalLM"
    assert recipe.task.inputs == {"input_ids": "tokens"}
    assert recipe.task.loss == {"_target_": "flowrun.models.losses.cross_entropy"}
    assert recipe.data["length"] == 256
    assert recipe.optim.lr == 2e-5  # its weights are trained already
    assert "# sbp: {from_model: tensor}" in again.file.read_text()


def test_a_folder_of_hugging_face_is_trained_on_chats(place: Path) -> None:
    """Prompts and padding are no targets, so the model's own loss of `labels` is not taken."""
    llama_folder(place, "tokenizer.json", max_position_embeddings=64)
    written = write_recipe("tiny", "flowrun.launcher.data.corpus.chat.Chat", Path("chat.yaml"))
    recipe = load(["recipe=chat.yaml", "data.path=talks.jsonl"])
    assert written.missing == ["data.path"]
    assert recipe.task.inputs == {"input_ids": "tokens"}
    assert recipe.task.loss == {"_target_": "flowrun.models.losses.cross_entropy"}
    assert recipe.data["length"] == 64 and recipe.data["tokenizer"] == "tiny"


def test_inputs_of_unknown_items_are_asked_for(place: Path) -> None:
    llama_folder(place)
    text = "class Mine:\n    def __init__(self, path):\n        self.path = path\n"
    (place / "mine_c.py").write_text(text)
    missing = ["data.path", "task.inputs", "task.loss"]
    assert write_recipe("tiny", "mine_c.Mine", None).missing == missing


def test_mistakes_are_refused(place: Path) -> None:
    module(place, "points_g")
    write_recipe("points_g", None, None)
    (place / "empty").mkdir()
    (place / "none.py").write_text("import torch\n")
    (place / "raises.py").write_text("import torch\ntorch.nothing\n")
    two = "from torch import nn\nclass A(nn.Module): ...\nclass B(nn.Module): ...\n"
    (place / "two.py").write_text(two)
    problems = {
        "points_g": "there already",
        "empty": r"no config\.json",
        "two": "defines 2 models: A, B",
        "none": "defines no models: no subclass",
        "raises": "importing 'raises' failed: AttributeError: module 'torch'",
        "nothing.Net": "there is no module 'nothing'",
        "points_g.Nett": "has no 'Nett'",
    }
    for target, problem in problems.items():
        with pytest.raises(RecipeError, match=problem) as refused:
            write_recipe(target, None, None)
        assert explain(refused.value, []).startswith("command line  ")


PAIRS = """
    def __len__(self):
        return 64

    def __getitem__(self, k):
        return torch.randn(8, generator=torch.Generator().manual_seed(k)), k % 3
"""
TUPLES = f"""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x)


class Own(Net):
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(x), y)


class Optional(Net):
    def forward(self, x, labels=None):
        return nn.functional.cross_entropy(self.head(x), labels)


class Pairs:{PAIRS}

rows = [Pairs()[k] for k in range(64)]
"""


@pytest.mark.parametrize(
    ("model", "data", "names", "loss"),
    [
        ("Net", None, "[x, targets]", "losses.cross_entropy"),
        ("Net", "pairs.py:rows", "[x, targets]", "losses.cross_entropy"),
        ("Own", None, "[x, y]", "# loss: the model returns it"),
        ("Optional", None, "[x, labels]", "# loss: the model returns it"),
    ],
)
def test_values_of_tuples_get_the_names_of_arguments(
    place: Path, model: str, data: str | None, names: str, loss: str
) -> None:
    (place / "pairs.py").write_text(TUPLES)
    written = write_recipe(f"pairs.py:{model}", data, None)
    text = written.file.read_text()
    assert not written.missing and loss in text and f"names: {names}" in text
    assert ("task.loss is left out: the model returns it" in written.notes) == ("# loss" in loss)
    maker = "hydra.utils.get_object\n    path: pairs.rows" if data else "pairs.Pairs"
    assert f"  data:\n    _target_: {maker}\n" in text
    assert Job(load([f"recipe={written.file}"]), values=False).training.plan.num_ranks == 1


def test_a_function_that_makes_a_model_is_one(place: Path) -> None:
    text = "import torch\nfrom torch import nn\ndef build():\n    return nn.Linear(4, 2)\n"
    (place / "makes.py").write_text(text)
    write_recipe("makes", None, None)
    assert "_target_: makes.build" in Path("recipes/makes.yaml").read_text()


STUDY = f"""
import torch
from torch import nn


class Wave(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc = nn.Linear(width, 3)

    def forward(self, wave):
        return self.fc(wave)


class Patients:
    def __init__(self, folder):
        assert folder == "patients"
{PAIRS}"""


def test_a_recipe_with_gaps_names_them_all_when_it_is_planned(place: Path) -> None:
    (place / "study_a.py").write_text(STUDY)
    missing = ["model.width", "data.folder", "task.inputs", "task.loss"]
    assert write_recipe("study_a.Wave", None, None).missing == missing
    with pytest.raises(RecipeError) as refused:
        load(["recipe=wave"])
    named = "model.width, task.inputs.wave, task.loss._target_, data.folder"
    assert refused.value.problem == f"no value yet (???): {named}."


def test_arguments_are_given_on_the_command_line(place: Path) -> None:
    (place / "study_b.py").write_text(STUDY)
    words = ("model.width=8", "data.folder=patients")
    assert write_recipe("study_b.Wave", None, None, words).missing == []
    recipe = load(["recipe=wave"])
    assert (recipe.model["width"], recipe.data["data"]["folder"]) == (8, "patients")
    assert Job(recipe, values=False).training.plan.num_ranks == 1
    with pytest.raises(RecipeError, match="arguments of the model and of the data set"):
        write_recipe("study_b.Wave", None, None, ("train.steps=3",), force=True)
