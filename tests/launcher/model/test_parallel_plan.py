from pathlib import Path
from typing import Any

import pytest
import transformers

from flowrun.engine.errors import RecipeError
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.parallel_plan import find_others, read_plan
from flowrun.launcher.recipe.compose import load
from flowrun.models.mlp import MLP
from support.nets.small_llama import SMALL as SIZES
from support.nets.small_llama import small_llama

SMALL = {**SIZES, "vocab_size": 256, "num_hidden_layers": 2}
RECIPE = """\
defaults: [/data: text, /optim: adamw, /launch: virtual]
model:
  _target_: transformers.LlamaForCausalLM
  config: {_target_: transformers.LlamaConfig, vocab_size: 256, hidden_size: 16,
    intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
data: {length: 8, max_bytes: 20000}
task: {inputs: {input_ids: tokens, labels: tokens}}
placement: {axes: {tensor: 2}}
train: {batch_size: 4}
eval: {batches: 0}
engine: {cache: false, check_capture: false}
"""


ONE = "placement.axes.tensor=1"


def pins(model: Any) -> dict[str, str]:
    return {pin.pattern: str(pin.sbp) for pin in read_plan(model, "tensor")}


def test_columns_and_rows_are_those_of_megatron() -> None:
    found = pins(small_llama(**SMALL, attention_bias=True))
    layer = "model.layers.*"
    assert found == {
        "lm_head.weight": "S(0)",
        "model.embed_tokens.weight": "S(0)",
        **{f"{layer}.self_attn.{name}_proj.weight": "S(0)" for name in "qkv"},
        **{f"{layer}.self_attn.{name}_proj.bias": "S(0)" for name in "qkv"},
        f"{layer}.self_attn.o_proj.weight": "S(1)",
        f"{layer}.mlp.gate_proj.weight": "S(0)",
        f"{layer}.mlp.up_proj.weight": "S(0)",
        f"{layer}.mlp.down_proj.weight": "S(1)",
    }


def test_a_tied_head_has_the_pin_of_its_embedding() -> None:
    found = pins(small_llama(**SMALL, tie_word_embeddings=True))
    assert "lm_head.weight" not in found and found["model.embed_tokens.weight"] == "S(0)"


def test_experts_are_left_to_inference() -> None:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2, num_key_value_heads=2)
    model = transformers.MixtralForCausalLM(config)
    assert not any("experts" in name for name in pins(model))
    assert find_others(model) == ["moe_tp_experts", "packed_colwise"]


@pytest.mark.parametrize("name", ["GPT2", "MLP"])
def test_a_model_without_a_plan_is_refused(name: str) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    model = MLP(8, 8, 4) if name == "MLP" else transformers.GPT2LMHeadModel(config)
    with pytest.raises(RecipeError, match=f"{name}.* carries no tensor-parallel plan"):
        read_plan(model, "tensor")


def test_a_recipe_takes_the_plan_and_its_own_pins_replace_it(workplace: Path) -> None:
    (workplace / "llama.yaml").write_text(RECIPE)
    own = "sbp={from_model: tensor, lm_head.weight: {tensor: B}}"
    job = Job(load(["recipe=llama.yaml", own]), values=False)
    plan = job.training.plan
    homes = {v.name: str(v.nd_sbp[0]) for v in plan.variables.values() if v.kind == "parameter"}
    assert homes["model.layers.0.self_attn.q_proj.weight"] == "S(0)"
    assert homes["model.layers.0.mlp.down_proj.weight"] == "S(1)"
    assert homes["lm_head.weight"] == "B"
    assert homes["model.norm.weight"] == "B"


@pytest.mark.parametrize(
    ("overrides", "pinned"),
    [(["placement.axes.tensor=1"], False), ([], True)],
    ids=["one rank", "two"],
)
def test_an_axis_of_one_rank_needs_no_plan(
    workplace: Path, overrides: list[str], pinned: bool
) -> None:
    (workplace / "llama.yaml").write_text(RECIPE)
    job = Job(load(["recipe=llama.yaml", "sbp.from_model=tensor", *overrides]), values=False)
    assert bool(job.strategy.pins) == pinned


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["sbp.from_model=tensr"], "placement.axes has no axis 'tensr'"),
        (["sbp.from_model=true"], "placement.axes has no axis True"),
        (
            ["sbp.from_model=data", "placement.axes.data=2", "view=mirrored", ONE],
            "sbp.from_model lays",
        ),
    ],
)
def test_another_axis_is_refused(workplace: Path, keys: list[str], problem: str) -> None:
    (workplace / "llama.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError, match=problem):
        load(["recipe=llama.yaml", *keys])
