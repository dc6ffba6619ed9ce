"""Click logs: generated with the statistics that matter to tables of ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Clicks(Dataset[dict[str, Tensor]]):
    """Ids by Zipf's law, as words and users are: {ids (F,) int64, numbers (N,), clicks () float32}.

    samples: how many.  ids: rows of the model's table, over all fields; field f owns as many rows
    as every other.  exponent: of the law, p(rank r) ~ r ** -exponent within a field.  A sample is a
    function of (seed, index) alone; clicks follow a hidden weight of each id and of the numbers, so
    that there is something to learn.
    """

    def __init__(
        self,
        samples: int = 100_000,
        ids: int = 100_000,
        fields: int = 8,
        numbers: int = 4,
        exponent: float = 1.05,
        seed: int = 0,
    ) -> None:
        if ids < fields:
            raise ValueError(f"{ids} ids are too few for {fields} fields: each needs one")
        self.samples = samples
        self.rows = ids // fields
        self.fields = fields
        self.numbers = numbers
        self.exponent = exponent
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng((self.seed, index))
        ids = self._ranks(random.random(self.fields)) + np.arange(self.fields) * self.rows
        numbers = random.standard_normal(self.numbers).astype(np.float32)
        score = np.sin(ids * 12.9898).sum() + numbers.sum() / 2
        click = random.random() < 1 / (1 + np.exp(-score))
        return {
            "ids": torch.from_numpy(ids.astype(np.int64)),
            "numbers": torch.from_numpy(numbers),
            "clicks": torch.tensor(float(click)),
        }

    def _ranks(self, uniform: np.ndarray) -> np.ndarray:
        """Ranks from 0, by the inverse of the law's continuous distribution on [1, rows + 1)."""
        power, end = 1 - self.exponent, self.rows + 1.0
        if abs(power) < 1e-9:
            ranks = end**uniform
        else:
            ranks = (1 + uniform * (end**power - 1)) ** (1 / power)
        return np.minimum(ranks.astype(np.int64), self.rows) - 1
