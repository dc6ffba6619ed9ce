import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.export import export
from flowrun.launcher.commands.export_folder import export_folder
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.run import run

SMALL = """\
defaults: [/model: mlp, /data: digits, /optim: adamw, /launch: virtual]
model: {hidden: 16}
placement: {axes: {data: 2}}
engine: {check_capture: false, cache: false}
eval: {fraction: 0}
optim: {lr: 0.1}
train: {batch_size: 8, steps: 3, save_every: 2}
"""
OURS = "adapters: {rank: 2, alpha: 8, modules: [hidden, output]}\n"
PEFT = """\
defaults: [/data: digits, /optim: adamw, /launch: virtual]
model:
  _target_: peft.get_peft_model
  model: {_target_: flowrun.models.mlp.MLP, inputs: 64, hidden: 16, outputs: 10}
  peft_config: {_target_: peft.LoraConfig, r: 2, target_modules: [hidden, output]}
task:
  inputs: {x_BI: images}
  loss: {_target_: flowrun.models.losses.cross_entropy, target: labels}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of three steps: with adapters, with those of peft, and with none."""
    place = tmp_path_factory.mktemp("adapted")
    common = SMALL[SMALL.index("placement") :]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, text in {"ours": SMALL + OURS, "peft": PEFT + common, "none": SMALL}.items():
            (place / f"{name}.yaml").write_text(text)
            run(load([f"recipe={name}.yaml"]), place / name)
        yield place


def _base(place: Path, name: str) -> tuple[Recipe, nn.Module]:
    recipe = load([f"recipe={place / name}.yaml"])
    plain = {key: value for key, value in recipe.model.items() if key != "peft_config"}
    plain = plain.get("model", plain)
    base = replace(recipe, model=plain, adapters=replace(recipe.adapters, modules=()))
    return recipe, instantiate_model(base)


def _trained(recipe: Recipe, folder: Path) -> nn.Module:
    model = instantiate_model(recipe)
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    return model


@pytest.mark.parametrize("name", ["ours", "peft"])
def test_merged_weights_and_adapters_alone_make_the_same_logits(place: Path, name: str) -> None:
    x = torch.randn(4, 64)
    recipe, plain = _base(place, name)
    expected = _trained(recipe, place / name)(x)
    assert not torch.allclose(plain(x), expected, atol=1e-3)
    merged = export(place / name)
    assert merged.name == "merged_step_00000003.safetensors"
    found: Any = peft.PeftModel.from_pretrained(plain, str(export(place / name, adapters=True)))
    assert torch.allclose(found(x), expected, atol=1e-6)
    _, again = _base(place, name)
    again.load_state_dict(load_file(merged))
    assert torch.allclose(again(x), expected, atol=1e-6)


def test_the_config_is_what_the_recipe_says(place: Path) -> None:
    config = peft.LoraConfig.from_pretrained(str(export(place / "ours", adapters=True)))
    assert (config.r, config.lora_alpha, config.target_modules) == (2, 8, {"hidden", "output"})


def test_a_checkpoint_is_merged_as_well(place: Path, tmp_path: Path) -> None:
    file = export(place / "ours", step=2, to=tmp_path / "at" / "two.safetensors")
    assert load_file(file).keys() == load_file(export(place / "ours")).keys()
    assert not torch.equal(
        load_file(file)["hidden.weight"], load_file(export(place / "ours"))["hidden.weight"]
    )


def test_a_run_without_adapters_has_none_to_write(place: Path) -> None:
    with pytest.raises(RecipeError, match=r"trained no adapters"):
        export(place / "none", adapters=True)
    assert export(place / "none").name == "weights.safetensors"


def test_adapters_alone_would_lose_what_else_was_trained(place: Path, tmp_path: Path) -> None:
    groups = {"output.bias": {"frozen": False}}
    recipe = load([f"recipe={place / 'ours'}.yaml", "train.steps=1", "train.save_every=0"])
    text = recipe.to_yaml().replace("groups: {}", f"groups: {groups}")
    (tmp_path / "more.yaml").write_text(text)
    run(load([f"recipe={tmp_path / 'more.yaml'}"]), tmp_path / "more")
    with pytest.raises(RecipeError, match=r"output\.bias"):
        export(tmp_path / "more", adapters=True)
    assert "output.bias" in load_file(export(tmp_path / "more"))


EVIL = "open({ran!r}, 'w')\n\n\nclass Net:\n    pass\n"


@pytest.mark.parametrize("format", ["safetensors", "adapters", "hf"])
@pytest.mark.parametrize("name", ["ours", "peft", "none"])
def test_no_code_of_a_foreign_recipe_runs(
    place: Path, tmp_path: Path, name: str, format: str
) -> None:
    shutil.copytree(place / name, tmp_path / "run")
    (tmp_path / "evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    recipe["model"] = {"_target_": "evil.Net", "weights": None}
    recipe["data"] = {"_target_": "evil.Net"}
    recipe["adapters"]["modules"] = ["x"]
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for step in (None, 2):
        if format == "hf":
            with pytest.raises(RecipeError, match=r"evil\.Net may be code of the run's own"):
                export_folder(tmp_path / "run", step=step)
        elif name == "none" and format == "adapters":
            with pytest.raises(RecipeError, match="trained no adapters"):
                export(tmp_path / "run", step, adapters=True)
        else:
            assert export(tmp_path / "run", step, adapters=format == "adapters").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["weights_step_00000002.safetensors", "hf", "adapters_step_2"])
def test_links_in_a_foreign_run_are_not_followed(place: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(place / "none", tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for link in (name, f"{name}.partial"):
        (tmp_path / "run" / link).symlink_to(precious)
    export(tmp_path / "run", 2)
    written = tmp_path / "run" / "weights_step_00000002.safetensors"
    assert not written.is_symlink() and "hidden.weight" in load_file(written)
    if name == "hf":
        with pytest.raises(RecipeError, match="it is a link"):
            export_folder(tmp_path / "run")
    assert precious.read_text() == "mine"
