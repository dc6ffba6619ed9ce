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


def align(target: Tensor, output: Tensor) -> Tensor:
    """Return the target in the shape of the output, where they differ in dims of size 1 alone.

    Raise ValueError for other shapes: broadcast, each output would meet targets of others.
    """
    if target.shape == output.shape:
        return target
    if [n for n in target.shape if n > 1] != [n for n in output.shape if n > 1]:
        shapes = f"{tuple(target.shape)} and the output {tuple(output.shape)}"
        raise ValueError(f"the target has the shape {shapes}: they must be equal")
    return target.reshape(output.shape)


def cross_entropy(
    output: object,
    batch: Mapping[str, Tensor],
    target: str = "targets",
    label_smoothing: float = 0.0,
    narrow: bool = False,
    part: OutputPart = None,
    class_dim: int = -1,
) -> Tensor:
    """Return the mean cross entropy of logits against class ids.

    output, part: hold the logits, see part_of: (..., V), or V in the dim class_dim.
    batch: has the class ids (...) in the field `target`; positions of -100 do not count.
    label_smoothing: share of the target that is spread over all classes, 0 to 1.  narrow: keep
    log-probabilities and gradients of logits in the logits' dtype, which under autocast takes half
    of the bytes; else in fp32.
    """
    logits = part_of(output, part)
    logits = logits if class_dim == -1 else logits.movedim(class_dim, -1)
    if logits.dim() == batch[target].dim() + 1 and logits.shape[:-1] != batch[target].shape:
        shapes = f"{tuple(batch[target].shape)} and the logits {tuple(logits.shape)}"
        raise ValueError(f"the class ids have the shape {shapes}: each needs logits of its own")
    logits, classes = logits.flatten(0, -2), batch[target].flatten().long()
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
    return (F.softplus(logits) - logits * align(batch[target], logits)).mean()


def squared_error(
    output: object, batch: Mapping[str, Tensor], target: str = "targets", part: OutputPart = None
) -> Tensor:
    """Return the mean squared error.

    output, part: hold the predictions (...), see part_of.  batch: has the values (...) in the field
    `target`.
    """
    predicted = part_of(output, part).float()
    return F.mse_loss(predicted, align(batch[target], predicted).float())


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


def distillation(
    output: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    target: str = "targets",
    temperature: float = 2.0,
    weight: float = 0.5,
) -> Tensor:
    """Return `weight` x the divergence of a model from its teacher, and cross entropy for the rest.

    output: logits (..., V) of both (models/reference.py).  Both are divided by the temperature, and
    their divergence is multiplied by its square (Hinton et al. 2015).  batch: has the class ids
    (...) in the field `target`; positions of -100 do not count.
    """
    own, taught = (
        (output[name].float() / temperature).log_softmax(-1) for name in ("model", "reference")
    )
    known = batch[target] != IGNORED
    apart = ((taught.exp() * (taught - own)).sum(-1) * known).sum() / known.sum()
    own_share = (1 - weight) * cross_entropy(output, batch, target, part="model")
    return weight * temperature**2 * apart + own_share


def preference(
    output: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    target: str = "targets",
    beta: float = 0.1,
) -> Tensor:
    """Return the loss of direct preference optimisation (Rafailov et al. 2023, equation 7).

    output: logits (B, 2, T, V) of a model and its reference, of the preferred answer and the other.
    batch: has the class ids (B, 2, T) in the field `target`; positions of -100 do not count.
    """

    def log_p(logits: Tensor) -> Tensor:
        lost = F.cross_entropy(
            logits.float().flatten(0, -2), batch[target].flatten(), reduction="none"
        )
        return -lost.view(batch[target].shape).sum(-1)

    gain = log_p(output["model"]) - log_p(output["reference"])
    return F.softplus(beta * (gain[:, 1] - gain[:, 0])).mean()


def contrast(output: Tensor, batch: Mapping[str, Tensor], temperature: float = 0.5) -> Tensor:
    """Return SimCLR's loss (Chen et al. 2020): of all views in a micro-batch, each finds the other
    of its sample.

    output: features (B, 2, D) of two views of each sample, of two samples or more.
    """
    if output.dim() != 3 or output.shape[1] != 2 or len(output) < 2:
        raise ValueError(
            f"output is of shape {tuple(output.shape)}: views need (B, 2, D), and B of 2 or more"
        )
    views = F.normalize(output.float().flatten(0, 1), dim=-1)
    alike = views @ views.T / temperature
    number = torch.arange(len(views), device=views.device)
    alike = alike.masked_fill(number[:, None] == number, float("-inf"))  # a view and itself
    return F.cross_entropy(alike, number + 1 - 2 * (number % 2))
