import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from flowrun.launcher.commands.start.json_schema import make_schema, write_schema
from flowrun.launcher.recipe.compose import load

RECIPES = sorted((Path(__file__).resolve().parents[4] / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = make_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_shipped_recipes_are_valid(validator: Any, file: Path) -> None:
    keys = OmegaConf.to_container(OmegaConf.load(file))  # which reads 3e-4 as a number
    assert list(validator.iter_errors(keys)) == []


def test_a_resolved_recipe_is_valid(validator: Any) -> None:
    text = load(["recipe=gpt_hybrid", "train.save_every=5"]).to_yaml()
    assert [error.message for error in validator.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    "keys",
    [
        {"trian": {}},
        {"train": {"step": 5}},
        {"train": {"steps": "many"}},
        {"train": {"batch_size": 0}},
        {"optim": {"lr": -1.0}},
        {"precision": {"dtype": "fp8"}},
        {"placement": {"axes": {"data": 0}}},
        {"engine": {"compiler": "gcc"}},
        {"engine": {"expert_room": 0.5}},
    ],
    ids=str,
)
def test_what_flowrun_refuses_is_marked(validator: Any, keys: Any) -> None:
    assert not validator.is_valid(keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"train": {"steps": "${oc.env:STEPS}"}},
        {"launch": {"hang_s": 0}},
        {"data": {"_target_": "x.Y", "path": "???"}},
        {"log": ["wandb", {"name": "mlflow"}]},
        {"placement": {"stages": [{"modules": ["a"], "ranks": [0]}], "in_flight": "1f1b"}},
        {"optim": {"schedule": {"name": "CosineAnnealingLR"}}},
    ],
    ids=str,
)
def test_what_flowrun_takes_is_not_marked(validator: Any, keys: Any) -> None:
    assert validator.is_valid(keys)


def test_the_file_says_what_keys_mean_and_how_an_editor_finds_it(tmp_path: Path) -> None:
    line = write_schema(file := tmp_path / "new" / "s.json")
    found = json.loads(file.read_text())
    meaning = found["properties"]["train"]["properties"]["steps"]["description"]
    assert meaning.startswith("number of steps")
    assert line == f"# yaml-language-server: $schema={file.resolve()}"
