"""A plain GPT: no ranks, no layouts.  Shapes in names: B samples, T tokens, D width, H heads, V
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.ops.nn.document_op import as_autocast
from flowrun.models.causal_attention import causal_attention


class Embed(nn.Module):
    """Token and position embeddings, summed."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.dropout(self.wte(tokens_BT) + self.wpe(positions_BT))


class Attention(nn.Module):
    """Self-attention; causal: a token sees no later one.

    Rows of `qkv` are ordered (heads, 3, head width): consecutive pieces of them are whole heads,
    with their q, k and v.  separate_qkv: q, k and v are layers of their own instead.  The number of
    heads follows from the width of these layers, so a rank with a part of their columns computes
    its own heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        bias: bool = True,
        dropout: float = 0.0,
        separate_qkv: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads, self.head_width = heads, width // heads
        self.share, self.separate_qkv, self.causal = dropout, separate_qkv, causal
        if separate_qkv:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor, documents_BN: Tensor | None = None) -> Tensor:
        C = self.head_width
        if self.separate_qkv:
            parts = (f(x_BTD).unflatten(-1, (-1, C)) for f in (self.q, self.k, self.v))
        else:
            parts = self.qkv(x_BTD).unflatten(-1, (-1, 3, C)).unbind(dim=3)
        q_BHTC, k_BHTC, v_BHTC = (part.transpose(1, 2) for part in parts)
        share = self.share if self.training else 0.0
        if self.causal:
            y_BHTC = causal_attention(q_BHTC, k_BHTC, v_BHTC, documents_BN, share)
        else:
            y_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC, dropout_p=share)
        return self.proj(y_BHTC.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, 4 times as wide inside."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width, bias=bias)
        self.fc2 = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BTD)))


class NarrowNorm(nn.LayerNorm):
    """A layer norm that reads, and so keeps, its input in autocast's dtype, as MPT's does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(as_autocast(input))


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy and added back."""

    def __init__(
        self,
        width: int,
        heads: int,
        bias: bool,
        dropout: float,
        separate_qkv: bool = False,
        norm: type[nn.LayerNorm] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.ln1 = norm(width)
        self.attn = Attention(width, heads, bias, dropout, separate_qkv)
        self.ln2 = norm(width)
        self.mlp = FeedForward(width, bias)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BTD: Tensor, documents_BN: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attn(self.ln1(x_BTD), documents_BN))
        return x_BTD + self.dropout(self.mlp(self.ln2(x_BTD)))


class GPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, V).

    vocabulary: number of token ids.  context: longest T.  depth: blocks.  width: must be a multiple
    of heads.
    bias: of the linear layers inside the blocks; the head has none.
    tied: the head's weight is the token embedding, as in GPT-2; else its own.
    dropout: share of zeros in embeddings, attention weights and the output of each layer.
    qkv_apart: q, k and v are layers of their own.  narrow_norms: NarrowNorm in the blocks.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        depth: int,
        heads: int,
        width: int,
        bias: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
        qkv_apart: bool = False,
        narrow_norms: bool = False,
    ) -> None:
        super().__init__()
        norm = NarrowNorm if narrow_norms else nn.LayerNorm
        self.embed = Embed(vocabulary, context, width, dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, bias, dropout, qkv_apart, norm) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.wte.weight
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        """Draw normal weights with a deviation of 1 / sqrt(width).

        Layers that add to the residual have 1 / sqrt(2 depth) of it (GPT-2, section 2.3).
        """
        std = self.norm.weight.numel() ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=std / (2 * depth) ** 0.5 if into_residual else std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens_BT: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the logits.

        positions: (B, T) of each token in its document; None: a sample is one document.  documents:
        lengths (B, N) of the documents of each sample.
        """
        x_BTD = self.embed(tokens_BT, positions)
        for block in self.blocks:
            x_BTD = block(x_BTD, documents)
        return self.head(self.norm(x_BTD))
