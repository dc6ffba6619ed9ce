import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.hugging_face.convert_models import make_theirs
from flowrun.launcher.model.hugging_face.own_models import find_counterpart
from flowrun.launcher.model.pretrained import read, weights_of
from flowrun.models.bert import BERT
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama
from flowrun.models.mlp import MLP

SAME = 1e-5  # of logits, which are of size 1
B, T, V, WIDTH = 2, 6, 32, 16
NONE: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def gpt(**arguments: Any) -> Callable[[], nn.Module]:
    return lambda: GPT(V, T, depth=2, heads=2, width=WIDTH, **arguments)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GPT-2": (gpt(bias=True), "GPT2LMHeadModel"),
    "GPT-2 tied, q k v": (gpt(bias=True, tied=True, qkv_apart=True), "GPT2LMHeadModel"),
    "GPT without bias": (gpt(), "OPTForCausalLM"),
    "GPT without bias, tied, q k v": (gpt(tied=True, qkv_apart=True), "OPTForCausalLM"),
    "Llama": (lambda: Llama(V, 2, 4, 2, WIDTH, 24, base=1e4), "LlamaForCausalLM"),
    "BERT": (lambda: BERT(V, T, 2, 2, WIDTH), "BertForMaskedLM"),
    "BERT untied": (lambda: BERT(V, T, 2, 2, WIDTH, tied=False), "BertForMaskedLM"),
}


def trained(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model none of whose weights is as it began: biases and norms are not 0 and 1."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return model


def batch_of(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What our model is called with, and theirs."""
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (B, T), generator=made)
    if not isinstance(model, BERT):
        return [tokens], {"input_ids": tokens}
    segments = torch.randint(2, (B, T), generator=made)
    every = torch.arange(T).expand(B, T)
    return [tokens, segments, every], {"input_ids": tokens, "token_type_ids": segments}


@torch.no_grad()
def difference(ours: nn.Module, theirs: Any) -> float:
    given, named = batch_of(ours)
    return float((ours(*given) - theirs(**named).logits).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_theirs_gives_the_same_logits_and_so_does_ours_again(name: str, tmp_path: Path) -> None:
    make, theirs_name = MODELS[name]
    ours = trained(make, seed=0)
    theirs = make_theirs(ours, NONE)
    assert type(theirs).__name__ == theirs_name
    assert difference(ours, theirs) < SAME
    theirs.save_pretrained(tmp_path)
    loaded = type(theirs).from_pretrained(tmp_path)
    assert difference(ours, loaded) < SAME
    again = trained(make, seed=1)
    assert difference(again, loaded) > 0.1
    again.load_state_dict(weights_of(again, str(tmp_path)), strict=False)
    assert difference(again, loaded) < SAME
    assert {n: v.shape for n, v in read(tmp_path).items()}.keys() <= set(loaded.state_dict())


def test_weights_saved_without_the_head_lack_it_alone(tmp_path: Path) -> None:
    ours = trained(MODELS["Llama"][0], seed=0)
    theirs = make_theirs(ours, NONE)
    theirs.model.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"1 are missing: head\.weight\n"):
        weights_of(ours, str(tmp_path))


def test_a_tied_head_may_be_saved_without_the_head(tmp_path: Path) -> None:
    ours, again = (trained(MODELS["GPT-2 tied, q k v"][0], seed) for seed in (0, 1))
    theirs = make_theirs(ours, NONE)
    theirs.transformer.save_pretrained(tmp_path)
    again.load_state_dict(weights_of(again, str(tmp_path)), strict=False)
    assert difference(again, theirs) < SAME


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("activation_function", "gelu_new", "activation_function is gelu_new there and gelu here"),
        ("n_head", 4, "n_head is 4 there and 2 here"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True there and False here"),
        ("model_type", "llama", "is of model_type 'llama'; this GPT is 'gpt2' to it"),
    ],
)
def test_a_folder_that_computes_something_else_is_refused(
    tmp_path: Path, key: str, value: object, problem: str
) -> None:
    ours = trained(MODELS["GPT-2"][0], seed=0)
    make_theirs(ours, NONE).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(RecipeError, match=problem):
        weights_of(ours, str(tmp_path))


def test_rotary_positions_of_another_base_are_refused(tmp_path: Path) -> None:
    make_theirs(trained(MODELS["Llama"][0], seed=0), NONE).save_pretrained(tmp_path)
    other = Llama(V, 2, 4, 2, WIDTH, 24, base=5e5)
    with pytest.raises(
        RecipeError, match=r"rope_parameters is .*10000.* there and .*500000.* here"
    ):
        weights_of(other, str(tmp_path))


def test_a_class_without_counterpart_is_refused_by_name() -> None:
    assert find_counterpart(MLP(8, 8, 4)) is None
    with pytest.raises(RecipeError, match="transformers has no class that computes what MLP does"):
        make_theirs(MLP(8, 8, 4), NONE)


def test_a_model_of_transformers_is_its_own() -> None:
    theirs = make_theirs(trained(MODELS["Llama"][0], seed=0), NONE)
    assert make_theirs(theirs, NONE) is theirs
