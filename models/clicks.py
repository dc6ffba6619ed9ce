"""Click logs that are generated with the statistics of real ids."""

from __future__ import annotations

import numpy as np
import torch

from flowrun.launcher.data.stacked import Rows


class Clicks(Rows):
    """Click logs {ids (F,) int64, numbers (N,), clicks () float32} with ids by Zipf's law.

    samples: number of items.  ids: rows of the model's table, over all fields; each field owns an
    equal number of them.  exponent: of the law, p(rank r) ~ r ** -exponent within a field.  Clicks
    follow a hidden weight of each id and the numbers, so that there is something to learn.
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
            raise ValueError(f"{ids} ids are too few for {fields} fields; each needs at least one")
        random = np.random.default_rng(seed)
        rows = ids // fields
        ranks = zipf_ranks(random.random((samples, fields)), rows, exponent)
        found = ranks + np.arange(fields) * rows
        measured = random.standard_normal((samples, numbers))
        score = np.sin(found * 12.9898).sum(1) + measured.sum(1) / 2
        clicked = random.random(samples) < 1 / (1 + np.exp(-score))
        super().__init__(
            ids=torch.from_numpy(found),
            numbers=torch.from_numpy(measured.astype(np.float32)),
            clicks=torch.from_numpy(clicked.astype(np.float32)),
        )


def zipf_ranks(uniform: np.ndarray, rows: int, exponent: float) -> np.ndarray:
    """Return ranks 0 to rows - 1 by Zipf's law, by the inverse of its continuous distribution.

    uniform: numbers in [0, 1).  rows: number of ranks.  exponent: of the law.
    """
    power, end = 1 - exponent, rows + 1.0
    if abs(power) < 1e-9:
        ranks = end**uniform
    else:
        ranks = (1 + uniform * (end**power - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64), rows) - 1
