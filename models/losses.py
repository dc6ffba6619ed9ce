"""Losses: loss(output, batch) -> the mean over the batch, a float32 scalar."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrun.models.insightface import Scores
from flowrun.models.moe import Routed


def cross_entropy(
    output: Tensor,
    batch: Mapping[str, Tensor],
    target: str = "targets",
    label_smoothing: float = 0.0,
    narrow: bool = False,
) -> Tensor:
    """Mean cross entropy of logits (..., V) against class ids (...), the batch field `target`.

    Positions whose class is -100 count for nothing.  label_smoothing: share of the target that is
    spread over all classes, 0 to 1.  narrow: log-probabilities and gradients of logits are held in
    the logits' dtype, under autocast half of the bytes; else in fp32.
    """
    logits, classes = output.flatten(0, -2), batch[target].flatten()
    with torch.autocast("cpu", enabled=False):  # which would widen them
        logits = logits if narrow else logits.float()
        return F.cross_entropy(logits, classes, label_smoothing=label_smoothing).float()


def binary_cross_entropy(
    output: Tensor, batch: Mapping[str, Tensor], target: str = "targets"
) -> Tensor:
    """Mean binary cross entropy of logits (...) against shares of 0 to 1 (...), the batch field
    `target`.
    """
    logits = output.float()
    return (F.softplus(logits) - logits * batch[target]).mean()


def margin_softmax(output: Scores, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy of the logits (B, K) against the class that each sample hits.

    A product with the hits instead of a look-up: classes may be a sample of all, in any order.
    """
    log_p = output.logits.float().log_softmax(-1)
    return -(log_p * output.hits).sum(-1).mean()


def routed_cross_entropy(
    output: Routed, batch: Mapping[str, Tensor], target: str = "targets", balance: float = 0.01
) -> Tensor:
    """Cross entropy of the logits, and `balance` times how unevenly experts are used."""
    return cross_entropy(output.logits, batch, target) + balance * output.balance
