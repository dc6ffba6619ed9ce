"""A plain Llama 3: no ranks, no layouts.  Shapes in names: B samples, T tokens, D width, H heads, G
heads of keys and values, C width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.models.causal_attention import causal_attention


class Attention(nn.Module):
    """Causal self-attention with rotary positions; each head of keys serves several of queries."""

    def __init__(self, width: int, heads: int, key_heads: int, base: float) -> None:
        super().__init__()
        self.C, self.base = width // heads, base
        self.heads, self.key_heads = heads, key_heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, key_heads * self.C, bias=False)
        self.v = nn.Linear(width, key_heads * self.C, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(
        self, x_BTD: Tensor, positions_BT: Tensor | None = None, documents_BN: Tensor | None = None
    ) -> Tensor:
        """Return (B, T, D).  positions_BT, documents_BN: see Llama."""
        B, T, D = x_BTD.shape
        q_BHTC = self.q(x_BTD).view(B, T, self.heads, self.C).transpose(1, 2)
        k_BGTC = self.k(x_BTD).view(B, T, self.key_heads, self.C).transpose(1, 2)
        q_BHTC, k_BGTC = (self._rotate(x, positions_BT) for x in (q_BHTC, k_BGTC))
        v_BGTC = self.v(x_BTD).view(B, T, self.key_heads, self.C).transpose(1, 2)
        k_BHTC, v_BHTC = self._for_each_query(k_BGTC), self._for_each_query(v_BGTC)
        y_BHTC = causal_attention(q_BHTC, k_BHTC, v_BHTC, documents_BN)
        return self.proj(y_BHTC.transpose(1, 2).reshape(B, T, D))

    def _for_each_query(self, x_BGTC: Tensor) -> Tensor:
        B, G, T, C = x_BGTC.shape
        many = x_BGTC[:, :, None].expand(B, G, self.heads // G, T, C)
        return many.reshape(B, self.heads, T, C)

    def _rotate(self, x_BHTC: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Apply rotary positions to pairs (c, c + C / 2) (RoFormer, arXiv 2104.09864, 3.4.2)."""
        T, half = x_BHTC.shape[2], self.C // 2
        rates_C = self.base ** (-torch.arange(half, device=x_BHTC.device) / half).repeat(2)
        places = torch.arange(T, device=x_BHTC.device) if positions_BT is None else positions_BT
        angles = places[..., None] * rates_C
        angles = angles if positions_BT is None else angles[:, None]  # for all heads
        cos, sin = angles.cos().to(x_BHTC.dtype), angles.sin().to(x_BHTC.dtype)
        across_BHTC = torch.cat((-x_BHTC[..., half:], x_BHTC[..., :half]), dim=-1)
        return x_BHTC * cos + across_BHTC * sin


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int, base: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attn = Attention(width, heads, key_heads, base)
        self.mlp = FeedForward(width, inner)

    def forward(
        self, x_BTD: Tensor, positions_BT: Tensor | None = None, documents_BN: Tensor | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD), positions_BT, documents_BN)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Llama(nn.Module):
    """Tokens (B, T) -> logits (B, T, V) (The Llama 3 herd of models, arXiv 2407.21783, table 3)."""

    def __init__(
        self,
        vocabulary: int,
        depth: int,
        heads: int,
        key_heads: int,
        width: int,
        inner: int,
        base: float = 500_000.0,
    ) -> None:
        super().__init__()
        if width % heads or heads % key_heads:
            raise ValueError(f"width {width}, heads {heads}, key_heads {key_heads} do not divide")
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, key_heads, inner, base) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, tokens_BT: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the logits.

        positions: (B, T) of each token in its document; None: a sample is one document.  documents:
        lengths (B, N) of the documents of each sample.
        """
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, positions, documents)
        return self.head(self.norm(x_BTD))
