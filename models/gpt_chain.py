"""A GPT as a chain: an embedding, blocks and a head, each fed by the one before, with q, k and v as
layers of their own.

torch's own parallel layouts fit it best: its list of modules can be wrapped, split by columns or
cut.  Shapes in names: B samples, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.models.gpt import Attention


class Embed(nn.Module):
    """Token embeddings plus learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.tokens(tokens_BT) + self.positions(places_T)


class Block(nn.Module):
    """Attention and two layers with a GELU between, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, separate_qkv=True)
        self.ln2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln1(x_BTD))
        return x_BTD + self.fc2(F.gelu(self.fc1(self.ln2(x_BTD))))


class Head(nn.Module):
    """A last norm, and logits (B, T, V) by a matrix of its own."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(self.norm(x_BTD))


class ChainGPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, V).

    vocabulary: number of token ids.  context: longest T.  depth: blocks.  width: a multiple of
    heads.
    """

    def __init__(self, vocabulary: int, context: int, depth: int, heads: int, width: int) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = Head(vocabulary, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)
