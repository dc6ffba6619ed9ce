"""Which samples a step reads: a function of (seed, step) alone.

So every layout sees the same batches.  Sample number n of a run is entry n mod N of the n div N-th
permutation of the N training samples; nothing is dropped.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def sample_indices(seed: int, step: int, batch_size: int, num_samples: int) -> list[int]:
    """Data set indices of one step, in order, below num_samples; `step` counts from 0."""
    first = step * batch_size
    return [_sample(seed, number, num_samples) for number in range(first, first + batch_size)]


def _sample(seed: int, number: int, num_samples: int) -> int:
    epoch, position = divmod(number, num_samples)
    return int(_permutation(seed, epoch, num_samples)[position])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)
