from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from flowrun.engine.capture.patches.substitutes import narrow_residual
from flowrun.models.bert import BERT
from flowrun.models.gpt import GPT, Attention
from flowrun.models.llama import Llama
from flowrun.models.losses import cross_entropy
from flowrun.models.metrics import accuracy

SIZES = {"vocabulary": 11, "context": 6, "depth": 2, "heads": 2, "width": 8}
NEXT_TOKEN = {
    "gpt": lambda: GPT(**SIZES),
    "llama": lambda: Llama(vocabulary=11, depth=2, heads=4, key_heads=2, width=32, inner=48),
}


@pytest.mark.parametrize("make", NEXT_TOKEN.values(), ids=NEXT_TOKEN)
def test_who_predicts_the_next_token_does_not_look_ahead(make: Callable[[], nn.Module]) -> None:
    model = make()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 4] = 9
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :4], after[0, :4])
    assert not torch.allclose(before[0, 4], after[0, 4])


def test_q_k_and_v_apart_are_the_rows_of_one_layer() -> None:
    one, three = (
        GPT(11, context=6, depth=1, heads=2, width=8, qkv_apart=apart).blocks[0].attn
        for apart in (False, True)
    )
    rows_HNCD = one.qkv.weight.detach().view(2, 3, 4, 8)
    for k, layer in enumerate((three.q, three.k, three.v)):
        layer.weight = torch.nn.Parameter(rows_HNCD[:, k].reshape(8, 8))
    three.proj.weight = one.proj.weight
    x = torch.randn(1, 6, 8)
    torch.testing.assert_close(three(x), one(x))


TOKENS = torch.ones(1, 6, dtype=torch.long)
HF_SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
STREAMS: dict[str, tuple[Callable[[], nn.Module], str, tuple[torch.Tensor, ...]]] = {
    "gpt": (NEXT_TOKEN["gpt"], "blocks", (TOKENS,)),
    "llama": (NEXT_TOKEN["llama"], "blocks", (TOKENS,)),
    "bert": (
        lambda: BERT(**SIZES),
        "blocks",
        (TOKENS, torch.zeros_like(TOKENS), torch.tensor([[1, 4]])),
    ),
    "transformers": (
        lambda: LlamaModel(LlamaConfig(vocab_size=11, num_hidden_layers=2, **HF_SIZES)),
        "layers",
        (TOKENS,),
    ),
}


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize(("make", "blocks", "read"), STREAMS.values(), ids=STREAMS)
def test_between_blocks_a_sum_is_fp32_under_autocast_but_where_it_is_narrow(
    make: Callable[[], nn.Module], blocks: str, read: tuple[torch.Tensor, ...], narrow: bool
) -> None:
    model = make()
    passed: list[torch.dtype] = []
    for block in model.get_submodule(blocks).children():
        block.register_forward_hook(lambda _, __, made: passed.append(made.dtype))
    with narrow_residual(narrow):
        with torch.autocast("cpu", torch.bfloat16):
            model(*read)
        model(*read)
    under = torch.bfloat16 if narrow else torch.float32
    assert passed == [under] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("make", [GPT, BERT])
def test_a_width_that_heads_do_not_divide_is_refused(make: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        make(**{**SIZES, "heads": 3})


def test_each_unit_of_a_gpt_is_fed_by_the_one_before() -> None:
    model, tokens = GPT(**SIZES), torch.tensor([[1, 2, 3, 4, 5, 6]])
    chain = nn.Sequential(model.embed, *model.blocks, model.norm, model.head)
    assert torch.equal(chain(tokens), model(tokens))


def test_a_rank_with_half_of_the_columns_computes_half_of_the_heads() -> None:
    """As tensor parallelism splits it: the halves sum to the whole, but for proj's bias twice."""
    whole, x_BTD = Attention(8, 2, separate_qkv=True), torch.randn(1, 6, 8)
    total = torch.zeros(1, 6, 8)
    for rows in (slice(0, 4), slice(4, 8)):
        half = Attention(8, 2, separate_qkv=True)
        for ours, given in ((half.q, whole.q), (half.k, whole.k), (half.v, whole.v)):
            ours.weight, ours.bias = (
                nn.Parameter(given.weight[rows]),
                nn.Parameter(given.bias[rows]),
            )
        half.proj.weight, half.proj.bias = nn.Parameter(whole.proj.weight[:, rows]), whole.proj.bias
        total += half(x_BTD)
    torch.testing.assert_close(total - whole.proj.bias, whole(x_BTD))


def test_cross_entropy_is_the_mean_over_all_positions() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, {"targets": targets}), expected)


def test_a_narrow_loss_holds_nothing_wider_than_the_logits() -> None:
    logits, targets = torch.randn(4, 6, 11, dtype=torch.bfloat16), torch.randint(11, (4, 6))

    def held(narrow: bool) -> set[torch.dtype]:
        found = []
        wanted = logits.clone().requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(
                lambda x: (found.append(x.dtype), x)[1], lambda x: x
            ),
        ):
            loss = cross_entropy(wanted, {"targets": targets}, narrow=narrow)
        assert loss.dtype == torch.float32
        return {dtype for dtype in found if dtype.is_floating_point}

    assert torch.float32 in held(False)
    assert held(True) == {torch.bfloat16}


def test_accuracy_is_the_share_of_right_positions() -> None:
    logits = torch.eye(4)[None]
    assert accuracy(logits, {"y": torch.tensor([[0, 1, 2, 0]])}, target="y").item() == 0.75
