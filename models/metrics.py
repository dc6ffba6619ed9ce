"""Metrics: metric(output, batch) -> the mean over the batch, a float32 scalar.

Evaluation reports the mean over its batches.  A metric that is a function of such a mean, not a
mean itself, names it: metric.of_mean(mean over all batches) is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from flowrun.models.insightface import Scores
from flowrun.models.losses import cross_entropy
from flowrun.models.moe import Routed

IGNORED = -100  # torch's `ignore_index`


def accuracy(
    output: Tensor | Routed, batch: Mapping[str, Tensor], target: str = "targets"
) -> Tensor:
    """Share of positions whose largest logit (..., V) is the class id (...) in the batch field
    `target`; those of -100, which cross entropy ignores, do not count.
    """
    logits = output.logits if isinstance(output, Routed) else output
    known = batch[target] != IGNORED
    hits = (logits.argmax(dim=-1) == batch[target]) & known
    return hits.float().sum() / known.float().sum().clamp(min=1)


def binary_accuracy(output: Tensor, batch: Mapping[str, Tensor], target: str = "targets") -> Tensor:
    """Share of logits (...) on the side of 0 that the batch field `target` (...), 0 or 1, says."""
    return ((output > 0) == (batch[target] > 0.5)).float().mean()


def hit_rate(output: Scores, batch: Mapping[str, Tensor]) -> Tensor:
    """Share of samples none of whose logits (B, K) is larger than that of their own class.

    Maximum and own logit are one number of a sample each, however the classes are split.
    """
    own = (output.logits * output.hits).sum(-1)
    return (own >= output.logits.amax(-1)).float().mean()


def perplexity(output: Tensor, batch: Mapping[str, Tensor], target: str = "targets") -> Tensor:
    """Mean cross entropy; exp of its mean over all batches is the perplexity."""
    return cross_entropy(output, batch, target)


perplexity.of_mean = math.exp  # type: ignore[attr-defined]
