"""Wide & Deep for click rates (Cheng et al. 2016, arXiv 1606.07792): a linear model of ids plus an
MLP over their embeddings.

Shapes: B samples, F categorical fields, N numeric fields, D embedding width.  The ids of all
fields share one table, so that a table of any size is one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class WideDeep(nn.Module):
    """(ids (B, F) int64 below `ids`, numbers (B, N)) -> logits of a click (B,).

    ids: rows of the tables, over all fields.  width: D.  hidden: sizes of the MLP's hidden layers.
    """

    def __init__(
        self, ids: int, fields: int, numbers: int, width: int, hidden: Sequence[int]
    ) -> None:
        super().__init__()
        self.wide = nn.Embedding(ids, 1)
        self.deep = nn.Embedding(ids, width)
        sizes = [fields * width + numbers, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.mlp = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], 1)
        nn.init.zeros_(self.wide.weight)
        nn.init.uniform_(self.deep.weight, -0.05, 0.05)

    def forward(self, ids_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        wide_B = self.wide(ids_BF).flatten(1).sum(1)
        deep_BX = torch.cat([self.deep(ids_BF).flatten(1), numbers_BN], 1)
        return wide_B + self.head(self.mlp(deep_BX)).flatten()  # type: ignore[no-any-return]
