"""Which samples a step reads: a function of the seed and of the samples' numbers in the run alone.

So every layout sees the same batches.  Sample number n of a run is entry n mod N of the n div N-th
permutation of the N training samples; nothing is dropped.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng  # here: numpy would load it at first use, and lose a Ctrl-C
from torch import Tensor


def sample_indices(seed: int, numbers: range, num_samples: int) -> Tensor:
    """Data set indices (B,) int64, below num_samples, of the samples with these numbers in the run;
    there is at least one, and they follow each other.
    """
    epochs = range(numbers.start // num_samples, (numbers.stop - 1) // num_samples + 1)
    pieces = [
        _permutation(seed, epoch, num_samples)[
            max(0, numbers.start - epoch * num_samples) : numbers.stop - epoch * num_samples
        ]
        for epoch in epochs
    ]
    return torch.from_numpy(np.concatenate(pieces))  # which copies: the permutation is kept


def held_out_indices(numbers: range, held_out: int, num_samples: int) -> Tensor:
    """Data set indices (B,) int64 of evaluation: the last `held_out` in order, again and again."""
    found = num_samples - held_out + np.arange(numbers.start, numbers.stop) % held_out
    return torch.from_numpy(found)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray[Any, Any]:
    return default_rng((seed, epoch)).permutation(num_samples)
