import pytest
import torch
import transformers
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.text.text_model import text_model
from flowrun.models.bert import BERT
from flowrun.models.mlp import MLP
from support.nets.small_llama import SMALL as small_llama_sizes
from support.nets.small_llama import small_llama

TOKENS = {"tokens_BT": "tokens"}
SMALL = {**small_llama_sizes, "vocab_size": 32, "max_position_embeddings": 12}


class Pooled(nn.Module):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return torch.zeros(len(tokens_BT), 4)


def test_the_argument_is_that_of_the_tokens() -> None:
    llama = small_llama(**SMALL)
    found = text_model(llama, {"labels": "targets", "input_ids": "tokens"}, 8, "Llama")
    assert (found.argument, found.window) == ("input_ids", 12)
    assert text_model(llama, {}, None, "Llama").argument == "input_ids"


def test_logits_are_those_of_the_last_token() -> None:
    llama = small_llama(**SMALL).eval()
    found = text_model(llama, {}, None, "Llama").next_logits([[1, 2, 3]])[0]
    with torch.no_grad():
        assert torch.equal(found, llama(torch.tensor([[1, 2, 3]])).logits[0, -1])


@pytest.mark.parametrize(
    ("module", "inputs", "problem"),
    [
        (MLP(8, 8, 4), {"x": "images"}, r"none of its arguments \(x\) takes tokens"),
        (BERT(32, 8, 1, 2, 16), {}, "it needs segments_BT, positions_BK with the tokens"),
        (
            transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
            {},
            "it predicts no next token",
        ),
        (Pooled(), TOKENS, r"for tokens of shape \(1, 3\) it gives \(1, 4\), no logits"),
    ],
    ids=["images", "BERT", "BertForMaskedLM", "one output a text"],
)
def test_what_writes_no_text_is_refused_by_name(
    module: nn.Module, inputs: dict[str, str], problem: str
) -> None:
    with pytest.raises(RecipeError, match=f"A model writes no text: {problem}"):
        text_model(module, inputs, 8, "A model").next_logits([[1, 2, 3]])


def test_a_window_is_needed() -> None:
    with pytest.raises(RecipeError, match="nothing says how many tokens it reads"):
        text_model(Pooled(), TOKENS, None, "Pooled")


CAUSAL = {
    "Llama": {},
    "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 1},
    "Qwen2": {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
    },
    "Bloom": {"n_head": 2, "n_layer": 1},
    "Mamba": {"state_size": 4, "time_step_rank": 4},
}


@pytest.mark.parametrize("kind", CAUSAL)
@torch.no_grad()
def test_kept_keys_and_values_give_the_logits_of_a_whole_forward(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **CAUSAL[kind]})
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = text_model(module, {}, 12, kind)
    assert (not found.cache) == (kind == "Mamba")
    ids = [1, 2, 3]
    for _ in range(6):
        logits = module(torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(found.next_logits([ids])[0], logits, atol=1e-5)
        ids.append(int(logits.argmax()))
    other = [7, 2, 3, 4]  # another text
    logits = module(torch.tensor([other])).logits[0, -1]
    assert torch.allclose(found.next_logits([other])[0], logits, atol=1e-5)


def test_what_was_read_is_not_read_again() -> None:
    llama = small_llama(**SMALL)
    lengths: list[int] = []
    llama.get_input_embeddings().register_forward_hook(
        lambda module, given, output: lengths.append(given[0].shape[1])
    )
    found = text_model(llama, {}, None, "Llama")
    for length in (3, 4, 6, 12, 13, 14):  # of 12 that it has positions for
        found.next_logits([[1] * length])
    assert lengths == [3, 1, 2, 6, 12, 12]
