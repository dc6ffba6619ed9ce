"""Metrics: metric(output, batch) -> the mean over the batch, a float32 scalar.

Evaluation reports the mean over its batches.  A metric that is a function of such a mean, not a
mean itself, names it: metric.of_mean(mean over all batches) is reported.  One that needs all
samples returns rows (n, D), and metric.of_rows(rows of all batches, in any order) is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flowrun.models.insightface import Scores
from flowrun.models.losses import IGNORED, OutputPart, align, cross_entropy, part_of


def accuracy(
    output: object,
    batch: Mapping[str, Tensor],
    target: str = "targets",
    part: OutputPart = None,
    class_dim: int = -1,
) -> Tensor:
    """Return the share of positions whose largest logit is that of the target class.

    output, part: hold the logits, see losses.part_of: (..., V), or V in the dim class_dim.
    batch: has the class ids (...) in the field `target`; positions of -100, which cross entropy
    ignores, do not count.
    """
    known = batch[target] != IGNORED
    chosen = part_of(output, part).argmax(class_dim)
    hits = (chosen == align(batch[target], chosen)) & align(known, chosen)
    return hits.float().sum() / known.float().sum().clamp(min=1)


def binary_accuracy(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return the share of logits with the sign of their target.

    output, part: hold the logits (...), see losses.part_of.  batch: has the targets (...), 0 or 1,
    in the field `target`.
    """
    logits = part_of(output, part)
    return ((logits > 0) == (align(batch[target], logits) > 0.5)).float().mean()


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


def auc(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return rows of a score and a target, of which the area under the ROC curve is made.

    output, part: hold the scores (...), see losses.part_of.  batch: has the targets (...), 0 or 1,
    in the field `target`; positions of -100 do not count.
    """
    return torch.stack([part_of(output, part).flatten(), batch[target].flatten()], 1).float()


def _area(rows: Tensor) -> float:
    """Return the share of pairs of a hit and a miss whose hit has the higher score, ties halved
    (Mann and Whitney 1947).
    """
    rows = rows[rows[:, 1] != IGNORED]
    scores, hit = rows[:, 0], rows[:, 1] > 0.5
    _, number, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[number]
    hits, misses = int(hit.sum()), int((~hit).sum())
    above = float(ranks[hit].sum()) - hits * (hits + 1) / 2
    return above / (hits * misses) if hits and misses else math.nan


def f1(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return rows of a class that has the largest logit and its target, of which the mean F1 of all
    classes is made.

    output, part: hold the logits (..., V), see losses.part_of.  batch: has the class ids (...) in
    the field `target`; positions of -100 do not count.
    """
    found = part_of(output, part).argmax(-1)
    return torch.stack([found.flatten(), batch[target].flatten()], 1).float()


def _mean_f1(rows: Tensor) -> float:
    rows = rows[rows[:, 1] != IGNORED]
    if not len(rows):
        return math.nan
    found, asked = rows.long().T
    classes = int(max(found.max(), asked.max())) + 1
    both = torch.bincount(found[found == asked], minlength=classes)
    either = sum(torch.bincount(each, minlength=classes) for each in (found, asked))
    return float((2 * both / either)[either > 0].mean())


auc.of_rows, f1.of_rows = _area, _mean_f1  # type: ignore[attr-defined]
