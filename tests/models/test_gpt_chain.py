import torch
from torch import nn

from flowrun.models.gpt import Attention
from flowrun.models.gpt_chain import ChainGPT

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])


def gpt() -> ChainGPT:
    return ChainGPT(vocabulary=11, context=6, depth=2, heads=2, width=8)


def test_each_unit_is_fed_by_the_one_before() -> None:
    model = gpt()
    chain = nn.Sequential(model.embed, *model.blocks, model.head)
    assert torch.equal(chain(TOKENS), model(TOKENS))
    assert model(TOKENS).shape == (1, 6, 11)


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
