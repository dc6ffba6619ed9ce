"""BERT with its masked-LM head (Devlin et al., arXiv 1810.04805).

Shapes in names: B samples, T tokens, K masked positions of a sample, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.models.gpt import Attention, FeedForward


class Embed(nn.Module):
    """Token, position and segment embeddings, summed and normalised."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, tokens_BT: Tensor, segments_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token(tokens_BT) + self.position(positions_T) + self.segment(segments_BT)
        return self.dropout(self.norm(x_BTD))


class Block(nn.Module):
    """Attention, then feed-forward; each is added back, then normalised."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attn = Attention(width, heads, dropout=dropout, causal=False)
        self.ln1 = nn.LayerNorm(width, eps=1e-12)
        self.mlp = FeedForward(width)
        self.ln2 = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.ln1(x_BTD + self.dropout(self.attn(x_BTD)))
        return self.ln2(x_BTD + self.dropout(self.mlp(x_BTD)))


class Head(nn.Module):
    """Logits of the masked tokens: a dense layer, a norm, and a product with the vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x_BKD: Tensor) -> Tensor:
        return self.out(self.norm(F.gelu(self.dense(x_BKD))))


class BERT(nn.Module):
    """Tokens (B, T), their segments (B, T; 0 or 1) and masked positions (B, K) -> logits (B, K, V).

    The head reads only the masked positions, and every sample has K of them.  So the mean loss of a
    batch is the mean of the means of its parts, however it is split into ranks and micro-batches.

    vocabulary: number of token ids.  context: longest T.  depth: blocks.  width: a multiple of
    heads.  dropout: share of zeros in embeddings, attention weights and the output of each layer.
    tied: the head's product has the token embedding as its weight.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        depth: int,
        heads: int,
        width: int,
        dropout: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, context, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.head = Head(vocabulary, width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.head.out.weight = self.embed.token.weight

    def forward(self, tokens_BT: Tensor, segments_BT: Tensor, positions_BK: Tensor) -> Tensor:
        """Return logits (B, K, V) of tokens_BT, segments_BT, positions_BK (see the class)."""
        x_BTD = self.embed(tokens_BT, segments_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        where_BKD = positions_BK.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1])
        return self.head(x_BTD.gather(1, where_BKD))
