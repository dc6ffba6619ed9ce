from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.packed_inputs import packed_inputs
from flowrun.models.gpt import GPT
from flowrun.models.moe import MixtureGPT

VOCABULARY = 64
DOCUMENTS = torch.tensor([[5, 7, 12], [20, 4, 0]])
POSITIONS = torch.stack([torch.cat([*map(torch.arange, each)]) for each in DOCUMENTS.tolist()])
ITEM = {"tokens": POSITIONS[0], "documents": DOCUMENTS[0], "positions": POSITIONS[0]}
IDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
SMALL: dict[str, Any] = {**IDS, "hidden_size": 32}
SIZES: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


def make_model(kind: str, **config: Any) -> Any:
    """Make a causal model of transformers, with weights of one seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, f"{kind}Config")(**config)
        return transformers.AutoModelForCausalLM.from_config(made).train()


def alone(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of each document as a sample of its own, one after the other."""
    rows = zip(tokens, DOCUMENTS.tolist(), strict=True)
    parts = [part for row, sizes in rows for part in row.split(sizes) if len(part)]
    return torch.cat([model(part.unsqueeze(0)).logits[0] for part in parts])


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Llama", SIZES),
        ("Qwen3", {**SIZES, "head_dim": 8}),
        ("Mistral", {**SIZES, "sliding_window": 24}),
        ("GPT2", {**GPT2, **NO_DROPOUT}),
    ],
)
@torch.no_grad()
def test_documents_of_a_model_of_transformers_see_nothing_of_each_other(
    kind: str, config: dict[str, Any]
) -> None:
    model = make_model(kind, **config)
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = alone(model, tokens)
    inputs = packed_inputs(model, ITEM, {"input_ids": "tokens"})
    assert inputs == {"position_ids": "positions", "documents": "documents"}
    found = model(tokens, position_ids=POSITIONS, documents=DOCUMENTS).logits.flatten(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("Mistral", {**SIZES, "sliding_window": 8}, "some layers see a part of the tokens"),
        ("GPT2", GPT2, "knows no dropout=0.1 of attention weights .GPT2Attention"),
        ("Gemma2", {**SIZES, "head_dim": 8}, "knows no softcap .Gemma2Attention"),
        ("Bloom", {**SMALL, "n_layer": 1, "n_head": 4}, "is not transformers' AttentionInterface"),
        ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "it has layers of conv"),
    ],
)
@torch.no_grad()
def test_a_model_that_would_attend_otherwise_is_refused(
    kind: str, config: dict[str, Any], why: str
) -> None:
    model = make_model(kind, **config)
    with pytest.raises(RecipeError, match=why):
        packed_inputs(model, ITEM, {})
        model(POSITIONS, position_ids=POSITIONS, documents=DOCUMENTS)


@torch.no_grad()
def test_a_call_without_documents_is_refused() -> None:
    model = make_model("Llama", **SIZES)
    packed_inputs(model, ITEM, {})
    with pytest.raises(RecipeError, match="LlamaAttention is not handed the documents"):
        model(POSITIONS, position_ids=POSITIONS)
    with pytest.raises(RecipeError, match=r"padding is masked \(attention_mask\)"):
        model(POSITIONS, attention_mask=torch.ones(2, 24), documents=DOCUMENTS)


class NoPlaces(nn.Module):
    """It takes documents and no positions."""

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        return tokens


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: MixtureGPT(VOCABULARY, 24, 2, 2, 16, 4), "MixtureGPT .* takes no documents"),
        (NoPlaces, "NoPlaces .* does not take positions, which start again in each"),
    ],
)
def test_a_model_that_takes_no_documents_is_refused(
    make: Callable[[], nn.Module], why: str
) -> None:
    with pytest.raises(RecipeError, match=why) as told:
        packed_inputs(make(), ITEM, {"tokens_BT": "tokens"})
    assert "Write data.pack=false" in str(told.value)


def test_what_the_recipe_maps_stays() -> None:
    model = GPT(VOCABULARY, 24, 1, 2, 16)
    both = {"positions": "positions", "documents": "documents"}
    assert packed_inputs(model, ITEM, {"tokens_BT": "tokens"}) == both
    assert packed_inputs(model, ITEM, both) == {}
    assert packed_inputs(model, {"tokens": POSITIONS[0]}, {}) == {}
