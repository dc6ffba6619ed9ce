"""A multi-layer perceptron with one hidden layer: the model of the three seed programs."""

from __future__ import annotations

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
