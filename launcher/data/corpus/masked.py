"""Masked language modelling: hidden tokens of another data set, to be predicted from the rest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flowrun.launcher.data.collate import batch_of
from flowrun.launcher.data.stacked import StackedDataset
from flowrun.launcher.data.steps import sample_seconds

_SAMPLE_S = 17e-6  # seconds of a sample's draws on one core, about


class Masked(StackedDataset):
    """{tokens (T,), segments (T,), positions (K,), targets (K,)}, int64.

    source: a map-style data set with the field `tokens` (T,), ids below `vocabulary`.
    share: of the tokens that are to be predicted; every sample has the same number of them, K, so
    that a mean over any part of a batch weighs its samples alike.
    mask: the id of a hidden token.  80 % of the positions are hidden, 10 % hold a random id, 10 %
    keep theirs (Devlin et al., arXiv 1810.04805, section 3.1).
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
        self.ids_digest = getattr(source, "ids_digest", None)
        self.notes = getattr(source, "notes", ())
        self.sample_seconds = _SAMPLE_S + sample_seconds(source)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items; only the draws are made sample by sample."""
        tokens = batch_of(self.source, indices)["tokens"].clone()
        batch, length = tokens.shape
        count = max(1, round(self.share * length))
        positions, random = (np.empty((batch, count), np.int64) for _ in range(2))
        choice = np.empty((batch, count))
        for k, index in enumerate(indices.tolist()):
            draws = np.random.default_rng((self.seed, index))
            positions[k] = np.sort(draws.permutation(length)[:count])
            choice[k] = draws.random(count)
            random[k] = draws.integers(0, self.vocabulary, count)
        at, other, chance = (torch.from_numpy(each) for each in (positions, random, choice))
        targets = tokens.gather(1, at)
        shown = torch.where(chance < 0.9, other, targets)
        second_half = torch.from_numpy((np.arange(length) >= length // 2).astype(np.int64))
        return {
            "tokens": tokens.scatter_(1, at, torch.where(chance < 0.8, self.mask, shown)),
            "segments": second_half.repeat(batch, 1),
            "positions": at,
            "targets": targets,
        }
