"""Losses: loss(output, batch) -> the mean over the batch, a float32 scalar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrun.models.insightface import Scores
from flowrun.models.moe import Routed

IGNORED = -100  # a target that no loss counts: torch's `ignore_index`

OutputPart = int | str | None  # of an output that holds several tensors: a number, a key or a name


def part_of(output: Any, part: OutputPart) -> Tensor:
    """Return a part of what a model returns: of a tuple by number, of a dict or an object by name.

    part: None: the output, or its `logits`, as models of transformers return them.
    """
    if part is None and isinstance(output, Tensor):
        return output
    name: int | str = "logits" if part is None else part
    if isinstance(name, int) or isinstance(output, Mapping):
        return output[name]  # type: ignore[no-any-return]
    attribute: Tensor = getattr(output, name)
    return attribute


def model_loss(output: object, batch: Mapping[str, Tensor], part: OutputPart = "loss") -> Tensor:
    """Return the loss that the model has computed, as a part of its output (part_of)."""
    return part_of(output, part)


def cross_entropy(
    output: object,
    batch: Mapping[str, Tensor],
    target: str = "targets",
    label_smoothing: float = 0.0,
    narrow: bool = False,
    part: OutputPart = None,
) -> Tensor:
    """Return the mean cross entropy of logits against class ids.

    output, part: hold the logits (..., V), see part_of.
    batch: has the class ids (...) in the field `target`; positions of -100 do not count.
    label_smoothing: share of the target that is spread over all classes, 0 to 1.  narrow: keep
    log-probabilities and gradients of logits in the logits' dtype, which under autocast takes half
    of the bytes; else in fp32.
    """
    logits, classes = part_of(output, part).flatten(0, -2), batch[target].flatten()
    with torch.autocast("cpu", enabled=False):  # autocast would cast them to fp32
        logits = logits if narrow else logits.float()
        return F.cross_entropy(logits, classes, label_smoothing=label_smoothing).float()


def binary_cross_entropy(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return the mean binary cross entropy of logits against probabilities.

    output, part: hold the logits (...), see part_of.  batch: has the probabilities (...), 0 to 1,
    in the field `target`.
    """
    logits = part_of(output, part).float()
    return (F.softplus(logits) - logits * batch[target]).mean()


def squared_error(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return the mean squared error.

    output, part: hold the predictions (...), see part_of.  batch: has the values (...) in the field
    `target`.
    """
    return F.mse_loss(part_of(output, part).float(), batch[target].float())


def margin_softmax(output: Scores, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the logits (B, K) against the class that each sample hits.

    It is a product with the hits, not a look-up, as classes may be a sample of all in any order.
    """
    log_p = output.logits.float().log_softmax(-1)
    return -(log_p * output.hits).sum(-1).mean()


def routed_cross_entropy(
    output: Routed, batch: Mapping[str, Tensor], target: str = "targets", balance: float = 0.01
) -> Tensor:
    """Return the cross entropy of the logits plus `balance` times the imbalance of experts."""
    return cross_entropy(output.logits, batch, target) + balance * output.balance
