"""Metrics: metric(output, batch) -> the mean over the batch, a float32 scalar."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flowrun.models.insightface import Scores


def accuracy(output: Tensor, batch: Mapping[str, Tensor], target: str = "targets") -> Tensor:
    """Share of positions whose largest logit (..., V) is the class id (...) in the batch field
    `target`.
    """
    return (output.argmax(dim=-1) == batch[target]).float().mean()


def hit_rate(output: Scores, batch: Mapping[str, Tensor]) -> Tensor:
    """Share of samples none of whose logits (B, K) is larger than that of their own class.

    Maximum and own logit are one number of a sample each, however the classes are split.
    """
    own = (output.logits * output.hits).sum(-1)
    return (own >= output.logits.amax(-1)).float().mean()
