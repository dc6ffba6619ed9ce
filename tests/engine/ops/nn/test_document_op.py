import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor

from flowrun.engine.ops.nn import document_op
from flowrun.engine.ops.nn.attention import attend, attend_backward
from flowrun.engine.ops.nn.document_op import document_attention, documents_within
from flowrun.engine.ops.nn.ring_attention import Piece, meet

LENGTH, WIDTH = 16, 8
DOCUMENTS = {
    "mixed": [[5, 3, 8, 0], [16, 0, 0, 0], [1, 1, 1, 13]],
    "whole": [[16], [16], [16]],
    "gap": [[0, 16, 0], [4, 0, 12], [0, 0, 16]],
}


def draw_heads(dtype: torch.dtype) -> Tensor:
    """Draw (samples, length, heads, 3, width), as one product makes query, key and value."""
    draws = torch.Generator().manual_seed(0)
    result = torch.randn(3, LENGTH, 2, 3, WIDTH, generator=draws, dtype=torch.float64)
    return result.to(dtype).requires_grad_()


def mask_of(documents: Tensor) -> Tensor:
    """Return which tokens see which: (samples, 1, length, length)."""
    numbers = (torch.arange(LENGTH)[:, None] >= documents.cumsum(1)[:, None]).sum(-1)
    same = numbers[:, :, None] == numbers[:, None]
    return (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_it_is_attention_by_a_mask(lengths: list[list[int]], scale: float | None) -> None:
    heads, documents = draw_heads(torch.float64), torch.tensor(lengths)
    given = [x.transpose(1, 2) for x in heads.unbind(3)]
    actual, _ = document_attention(*given, documents, scale)
    masked = F.scaled_dot_product_attention(*given, attn_mask=mask_of(documents), scale=scale)
    torch.testing.assert_close(actual, masked, rtol=1e-12, atol=1e-12)
    weigh = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).double()
    one, other = (torch.autograd.grad((x * weigh).sum(), heads)[0] for x in (actual, masked))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.library.opcheck, from 2.14 on
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_shapes_and_strides_are_foreseen(lengths: list[list[int]]) -> None:
    heads = [x.transpose(1, 2) for x in draw_heads(torch.float32).detach().unbind(3)]
    given = (*(x.requires_grad_() for x in heads), torch.tensor(lengths), None)
    torch.library.opcheck(torch.ops.flowrun.document_attention.default, given)


@pytest.mark.parametrize("lengths", [[5, 3, 7], [20, -4, 0], [9, 9, 0]], ids=str)
def test_documents_that_do_not_fill_their_sample_are_refused(lengths: list[int]) -> None:
    given = [x.transpose(1, 2) for x in draw_heads(torch.float32).unbind(3)]
    with pytest.raises(ValueError, match=r"do not fill sample 0 of 16 tokens"):
        document_attention(*given, torch.tensor([lengths] * 3), None)


@drawn(
    cuts=st.sets(st.integers(1, LENGTH - 1)),
    ends=st.lists(st.sets(st.integers(1, 15)), min_size=3, max_size=3),
)
def test_pieces_of_samples_are_the_whole(cuts: set[int], ends: list[set[int]]) -> None:
    """Wherever samples and their documents are cut, each piece of queries attends as in all."""
    rows = [torch.tensor([0, *sorted(each), LENGTH]).diff() for each in ends]
    documents = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    query, key, value = (x.transpose(1, 2) for x in draw_heads(torch.float64).detach().unbind(3))
    made = document_attention(query, key, value, documents, None)
    grad = made[0].cos()
    whole = document_op.document_attention_backward(grad, query, key, value, *made, documents, None)
    borders = [0, *sorted(cuts), LENGTH]
    found, sums = [], [torch.zeros_like(x) for x in (key, value)]
    for start, end in itertools.pairwise(borders):
        assert documents_within(documents, start, end - start).sum(1).eq(end - start).all()
        at = slice(None), slice(None), slice(start, end)
        met = meet([Piece(0, end - start, start)], [Piece(0, LENGTH, 0)], causal=True)
        out = attend(met, query[at], key, value, documents=documents)
        read = grad[at], query[at], key, value, *out
        of_query, *of_keys = attend_backward(met, *read, documents=documents)
        found.append((*out, of_query))
        sums = [a + b for a, b in zip(sums, of_keys, strict=True)]
    pieces = (torch.cat(each, 2) for each in zip(*found, strict=True))
    for one, other in zip((*pieces, *sums), (*made, *whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
