"""Metrics: metric(output, batch) -> the mean over the batch, a float32 scalar."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def accuracy(output: Tensor, batch: Mapping[str, Tensor], target: str = "targets") -> Tensor:
    """Share of positions whose largest logit (..., V) is the class id (...) in the batch field
    `target`.
    """
    return (output.argmax(dim=-1) == batch[target]).float().mean()
