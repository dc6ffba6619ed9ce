"""Multi-layer perceptrons: the model of the three seed programs, with one hidden layer; and any."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Features (B, I) -> logits (B, O)."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.output(torch.relu(self.hidden(x_BI)))


class DeepMLP(nn.Module):
    """Features (B, widths[0]) -> logits (B, widths[-1])."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairs)

    def forward(self, x_BI: Tensor) -> Tensor:
        *hidden, output = self.layers
        for layer in hidden:
            x_BI = torch.relu(layer(x_BI))
        return output(x_BI)
