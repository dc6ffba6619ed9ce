"""The permutation that decides which samples a step reads: a function of the seed and of their
numbers in the run.

So every layout sees the same batches, and so may a plain torch loop.  Sample number n of
a run is entry n mod N of the n div N-th permutation of the N training samples; nothing is dropped.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.random import default_rng  # at the top: numpy imports it at first use and loses a Ctrl-C
from numpy.typing import NDArray
from torch import Tensor


def sample_indices(seed: int, numbers: range, num_samples: int) -> Tensor:
    """Return the data set indices (B,) int64 of samples.

    numbers: consecutive numbers in the run, at least one.  num_samples: training samples in the
    data set.
    """
    epochs = range(numbers.start // num_samples, (numbers.stop - 1) // num_samples + 1)
    pieces = [
        _permutation(seed, epoch, num_samples)[
            max(0, numbers.start - epoch * num_samples) : numbers.stop - epoch * num_samples
        ]
        for epoch in epochs
    ]
    return torch.from_numpy(np.concatenate(pieces))  # a copy, as the permutation is cached


def held_out_indices(numbers: range, held_out: int, num_samples: int) -> Tensor:
    """Return the data set indices (B,) int64 of evaluation samples with these `numbers`.

    They run through the last `held_out` of `num_samples` samples in order, again and again.
    """
    indices = num_samples - held_out + np.arange(numbers.start, numbers.stop) % held_out
    return torch.from_numpy(indices)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    return default_rng((seed, epoch)).permutation(num_samples)
