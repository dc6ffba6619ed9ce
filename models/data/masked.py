"""Masked language modelling: some tokens of another data set hidden, to be told by the rest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Masked(Dataset[dict[str, Tensor]]):
    """{tokens (T,), segments (T,), positions (K,), targets (K,)}, int64.

    source: a map-style data set with the field `tokens` (T,), ids below `vocabulary`.
    share: of the tokens that are looked at; every sample has the same number of them, K, so that a
    mean over any part of a batch weighs its samples alike.
    mask: the id that stands for a hidden token.  Of the positions 80 % are hidden, 10 % hold a
    random id, 10 % are left (Devlin et al., arXiv 1810.04805, section 3.1).
    Positions are a function of (seed, index).  segments: 0 in the first half, 1 in the second.
    """

    def __init__(
        self,
        source: Dataset[dict[str, Tensor]],
        vocabulary: int,
        mask: int,
        share: float = 0.15,
        seed: int = 0,
    ) -> None:
        self.source = source
        self.vocabulary, self.mask, self.share, self.seed = vocabulary, mask, share, seed

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.source[index]["tokens"].clone()
        length = len(tokens)
        count = max(1, round(self.share * length))
        draws = np.random.default_rng((self.seed, index))
        positions = torch.from_numpy(np.sort(draws.permutation(length)[:count]))
        targets = tokens[positions]
        choice = torch.from_numpy(draws.random(count))
        random = torch.from_numpy(draws.integers(0, self.vocabulary, count))
        shown = torch.where(choice < 0.9, random, targets)
        tokens[positions] = torch.where(choice < 0.8, self.mask, shown)
        segments = (torch.arange(length) >= length // 2).long()
        return {
            "tokens": tokens,
            "segments": segments,
            "positions": positions,
            "targets": targets,
        }
