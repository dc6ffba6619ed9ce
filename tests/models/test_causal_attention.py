import pytest
import torch
import torch.nn.functional as F

from flowrun.models.causal_attention import causal_attention


def test_one_document_is_causal_attention_and_values_may_be_narrow() -> None:
    draws = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 9, 8, generator=draws) for _ in range(2))
    value = torch.randn(2, 3, 9, 5, generator=draws)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(causal_attention(query, key, value), plain)
    found = causal_attention(query, key, value, torch.tensor([[9], [9]]))
    torch.testing.assert_close(found, plain)


def test_under_autocast_it_multiplies_in_its_dtype() -> None:
    x = torch.randn(1, 2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert causal_attention(x, x, x, torch.tensor([[2, 4]])).dtype == torch.bfloat16


def test_dropout_within_documents_is_refused() -> None:
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="packed documents have no dropout"):
        causal_attention(x, x, x, torch.tensor([[2, 4]]), dropout=0.1)
