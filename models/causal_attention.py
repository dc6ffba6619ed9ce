"""Causal attention, also of samples in which several documents stand one after the other."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flowrun.engine.ops.nn.document_op import as_autocast, document_attention


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return scaled dot product attention (B, H, T, C) in which a token sees no later one.

    query, key, value: (B, H, T, C); value may be narrower.  documents: lengths (B, N) of the
    documents that fill each sample, 0 after the last; a token sees those of its own document
    alone.  None: a sample is one.
    dropout: of the attention weights.  scale: of the scores; None: 1 / sqrt(C).  Raise ValueError
    for dropout within documents.
    """
    if documents is None:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale
        )
    if dropout:
        raise ValueError("packed documents have no dropout of attention weights: write 0")
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    out, _ = document_attention(*map(as_autocast, (query, key, value)), documents, scale)
    return out[..., :width]  # type: ignore[no-any-return]
