"""Losses: loss(output, batch) -> the mean over the batch, a float32 scalar."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(output: Tensor, batch: Mapping[str, Tensor], target: str = "targets") -> Tensor:
    """Mean cross entropy of logits (..., V) against class ids (...), the batch field `target`."""
    return F.cross_entropy(output.flatten(0, -2).float(), batch[target].flatten())
