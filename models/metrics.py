"""Metrics: metric(output, batch) -> the mean over the batch, a float32 scalar.

Evaluation reports the mean over its batches.  A metric that is a function of such a mean, not a
mean itself, names it: metric.of_mean(mean over all batches) is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from flowrun.models.insightface import Scores
from flowrun.models.losses import IGNORED, OutputPart, cross_entropy, part_of


def accuracy(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return the share of positions whose largest logit is that of the target class.

    output, part: hold the logits (..., V), see losses.part_of.  batch: has the class ids (...) in
    the field `target`; positions of -100, which cross entropy ignores, do not count.
    """
    logits = part_of(output, part)
    known = batch[target] != IGNORED
    hits = (logits.argmax(dim=-1) == batch[target]) & known
    return hits.float().sum() / known.float().sum().clamp(min=1)


def binary_accuracy(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return the share of logits with the sign of their target.

    output, part: hold the logits (...), see losses.part_of.  batch: has the targets (...), 0 or 1,
    in the field `target`.
    """
    return ((part_of(output, part) > 0) == (batch[target] > 0.5)).float().mean()


def hit_rate(output: Scores, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the share of samples whose logits (B, K) are none larger than that of their own class.

    Maximum and own logit are one number a sample each, so split classes exchange little.
    """
    own = (output.logits * output.hits).sum(-1)
    return (own >= output.logits.amax(-1)).float().mean()


def perplexity(output: object, batch: Mapping[str, Tensor], target: str = "targets") -> Tensor:
    """Return the mean cross entropy; exp of its mean over all batches is the perplexity."""
    return cross_entropy(output, batch, target)


perplexity.of_mean = math.exp  # type: ignore[attr-defined]
