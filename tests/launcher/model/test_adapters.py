from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import describe_model, instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import Adapters
from flowrun.models.lora import find_loras, lora_scale

SMALL = ("recipe=gpt_tp", "launch=virtual", "model.depth=2", "model.width=32", "engine.cache=false")


def recipe(*modules: str, **optim: object) -> Recipe:
    found: Recipe = load([*SMALL, "data.max_bytes=100000"])
    adapters = Adapters(rank=2, modules=modules)
    return replace(found, adapters=adapters, optim=replace(found.optim, **optim))


def test_named_linears_are_trained_and_nothing_else() -> None:
    model = instantiate_model(recipe("*.attn.qkv", "blocks.1.mlp.*"))
    trained = {name.rsplit(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    expected = {f"blocks.{k}.attn.qkv" for k in (0, 1)} | {"blocks.1.mlp.fc1", "blocks.1.mlp.fc2"}
    assert trained == expected


def test_every_key_reaches_each_adapter() -> None:
    keys = ["adapters.rank=3", "adapters.alpha=6", "adapters.dropout=0.25"]
    model = instantiate_model(load([*SMALL, "adapters.modules=['*.qkv']", *keys]))
    for _, lora in find_loras(model):
        assert (lora.lora_A.out_features, lora_scale(lora)) == (3, 2.0)
        assert cast(nn.Dropout, lora.lora_dropout).p == 0.25
    assert len([*find_loras(model)]) == 2


def test_a_group_trains_more_than_the_adapters() -> None:
    groups = {"*.ln1.weight": {"frozen": False}}
    model = instantiate_model(recipe("*.qkv", groups=groups))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    expected = ["blocks.0.ln1.weight", "blocks.1.ln1.weight"]
    assert [name for name in trained if "lora" not in name] == expected


def test_initial_values_are_the_same_made_one_by_one() -> None:
    given = recipe("*.qkv")
    whole, described = instantiate_model(given), describe_model(given)
    for name, value in whole.state_dict().items():
        assert torch.equal(described.initial[name], value), name
    plain = instantiate_model(recipe())
    for name, value in plain.state_dict().items():
        assert torch.equal(described.initial[name], value), name


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("qkv", r"'qkv' matches no module\..*'\*\.qkv'"),
        ("*.q_kv", r"'\*\.q_kv' matches no module\..*'\*\.qkv'"),
        ("blocks.*.mlp", r"blocks\.0\.mlp, a FeedForward, which is not an nn\.Linear.*\*\.fc1"),
        ("*.ln1", r"blocks\.0\.ln1, a LayerNorm, which is not an nn\.Linear.*\*\.fc1"),
    ],
)
def test_a_pattern_that_matches_no_linear_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(RecipeError, match=r"adapters\.modules") as refused:
        instantiate_model(recipe(pattern))
    refused.match(f"(?s){said}")


def test_a_tied_weight_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two_names.py").write_text(
        "from torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "        self.last.weight = self.first.weight\n"
    )
    given = replace(recipe("last"), model={"_target_": "two_names.Tied"})
    with pytest.raises(RecipeError, match=r"the weight of last is tied"):
        instantiate_model(given)


def test_a_linear_whose_weight_alone_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weight_alone.py").write_text(
        "from torch import nn\n"
        "class Reads(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = nn.Embedding(256, 8)\n"
        "        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 256)\n"
        "    def forward(self, tokens_BT):\n"
        "        x = nn.functional.linear(self.embed(tokens_BT), self.first.weight)\n"
        "        return self.last(x)\n"
    )
    given = replace(recipe("first", "last"), model={"_target_": "weight_alone.Reads"}, pins=())
    with pytest.raises(RecipeError, match=r"forward never calls first"):
        Job(given, values=False).training  # noqa: B018


def test_weights_of_the_base_alone_are_read(tmp_path: Path) -> None:
    base = instantiate_model(load([*SMALL, "train.seed=7"])).state_dict()
    save_file(base, tmp_path / "base.safetensors")
    given = replace(recipe("*.qkv"), weights=str(tmp_path / "base.safetensors"))
    model = instantiate_model(given).state_dict()
    assert all(torch.equal(model[name], value) for name, value in base.items())
    assert describe_model(given).initial["blocks.0.attn.qkv.lora_A.weight"].any()
    whole = {name: value + 1 for name, value in model.items()}
    save_file(whole, tmp_path / "whole.safetensors")
    again = instantiate_model(replace(given, weights=str(tmp_path / "whole.safetensors")))
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())


def test_a_model_that_peft_has_wrapped_reads_weights_of_the_base(tmp_path: Path) -> None:
    base = instantiate_model(load([*SMALL, "train.seed=7"])).state_dict()
    save_file(base, tmp_path / "base.safetensors")
    given = recipe()
    lora = {"_target_": "peft.LoraConfig", "r": 2, "target_modules": ["qkv"]}
    wrapped = {"_target_": "peft.get_peft_model", "model": given.model, "peft_config": lora}
    given = replace(given, model=wrapped, weights=str(tmp_path / "base.safetensors"))
    described = describe_model(given)
    assert not described.notes
    initial = {n.removeprefix("base_model.model."): v for n, v in described.initial.items()}
    assert torch.equal(
        initial["blocks.0.attn.qkv.base_layer.weight"], base["blocks.0.attn.qkv.weight"]
    )
    assert torch.equal(initial["head.weight"], base["head.weight"])
    assert {n for n, p in described.model.named_parameters() if p.requires_grad} == {
        f"base_model.model.blocks.{k}.attn.qkv.lora_{x}.default.weight"
        for k in (0, 1)
        for x in "AB"
    }


def test_a_wrong_pattern_is_refused_before_weights_take_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowrun.launcher.model.build.instantiate_model", None)
    with pytest.raises(RecipeError, match="'qkv' matches no module"):
        describe_model(recipe("qkv"))
