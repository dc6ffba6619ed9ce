"""The samples that a step reads are a function of the seed and of their numbers in the run.

So every layout sees the same batches, and so may a plain torch loop.  Sample number n of
a run is entry n mod N of the n div N-th permutation of the N training samples; nothing is dropped.
data.order puts a function of one's own, `draw_in_blocks` or `draw_by_weight` in the place of the
permutation: (seed, epoch, numbers in the epoch (B,)) -> indices (B,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.random import default_rng  # at the top: numpy imports it at first use and loses a Ctrl-C
from numpy.typing import NDArray
from torch import Tensor

Order = Callable[[int, int, Tensor], Tensor]


def sample_indices(
    seed: int, numbers: range, num_samples: int, order: Order | None = None
) -> Tensor:
    """Return the data set indices (B,) int64 of samples.

    numbers: consecutive numbers in the run, at least one.  num_samples: training samples in the
    data set.  order: of each epoch; None: a permutation.  Raise ValueError for indices of it that
    are none.
    """
    pieces = []
    for epoch in range(numbers.start // num_samples, (numbers.stop - 1) // num_samples + 1):
        first = max(0, numbers.start - epoch * num_samples)
        last = min(num_samples, numbers.stop - epoch * num_samples)
        if order is None:
            pieces.append(torch.from_numpy(_permutation(seed, epoch, num_samples)[first:last]))
            continue
        found = torch.as_tensor(order(seed, epoch, torch.arange(first, last)))
        if found.shape != (last - first,) or found.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"it returns {found.dtype} of shape {tuple(found.shape)}, not indices")
        if bool((found < 0).any() or (found >= num_samples).any()):
            raise ValueError(f"its indices are not all of 0 to {num_samples - 1}")
        pieces.append(found.long())
    return torch.cat(pieces)  # a copy, as the permutation is cached


def in_order(_seed: int, _epoch: int, numbers: Tensor) -> Tensor:
    """Return the samples of each epoch in the order that they have."""
    return numbers


def draw_by_weight(
    seed: int, epoch: int, numbers: Tensor, *, weights: Sequence[float] | str, num_samples: int
) -> Tensor:
    """Draw samples with replacement, each by its weight (torch's WeightedRandomSampler).

    weights: one for each training sample, or a .npy file of them.
    """
    given = weights if isinstance(weights, str) else tuple(weights)
    return torch.from_numpy(_draws(seed, epoch, given, num_samples))[numbers]


def draw_in_blocks(
    seed: int, epoch: int, numbers: Tensor, *, block: int, mixed: int = 16, num_samples: int
) -> Tensor:
    """Draw each sample once: blocks of successive ones, and samples of some blocks at a time.

    For data that is read in blocks and is larger than what is kept of it.  block: samples.  mixed:
    blocks that samples are drawn from at a time.
    """
    return torch.from_numpy(_mixed_blocks(seed, epoch, block, mixed, num_samples))[numbers]


def held_out_indices(numbers: range, held_out: int, num_samples: int) -> Tensor:
    """Return the data set indices (B,) int64 of evaluation samples with these `numbers`.

    They run through the last `held_out` of `num_samples` samples in order, again and again.
    """
    indices = num_samples - held_out + np.arange(numbers.start, numbers.stop) % held_out
    return torch.from_numpy(indices)


@lru_cache(maxsize=4)
def _draws(
    seed: int, epoch: int, weights: str | tuple[float, ...], num_samples: int
) -> NDArray[np.int64]:
    each = np.load(weights) if isinstance(weights, str) else np.array(weights)
    if each.shape != (num_samples,):
        raise ValueError(f"{each.shape} are the weights, and {num_samples} the training samples")
    return default_rng((seed, epoch)).choice(num_samples, num_samples, p=each / each.sum())


@lru_cache(maxsize=4)
def _mixed_blocks(
    seed: int, epoch: int, block: int, mixed: int, num_samples: int
) -> NDArray[np.int64]:
    blocks = _permutation(seed, epoch, -(-num_samples // block))
    samples = (blocks[:, None] * block + np.arange(block)).ravel()
    samples = samples[samples < num_samples]  # the last block may be shorter
    parts = np.arange(num_samples) // (mixed * block)
    return samples[np.argsort(parts + default_rng((seed, epoch, block)).random(num_samples))]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    return default_rng((seed, epoch)).permutation(num_samples)
