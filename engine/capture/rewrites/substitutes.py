"""substitutes: functions of torch.nn, written otherwise while a model is captured.

Each computes what torch's does.  In ops that are independent of each other along the batch:

    embedding_bag   bags of equal length: look-ups and a reduction, not offsets into one long list
    ctc_loss        lengths as tensors: torch's op would make a tensor whose size depends on them

Without a look at values, which capture does not know:

    batch_norm      momentum=None: the average's share is 1 / batches so far, as a tensor
    is_causal       of a Transformer's mask: torch compares it with the causal one, for speed alone
    gaussian_nll_loss   a negative variance is looked for by an assert (kept under engine.check)

Relied upon of torch (tests/engine/capture/rewrites/test_substitutes.py): modules call these
functions by their names in torch.nn.functional and torch.nn.modules.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm

_embedding_bag, _ctc_loss, _gaussian = F.embedding_bag, F.ctc_loss, F.gaussian_nll_loss
_batch_norm = _BatchNorm.forward


@contextlib.contextmanager
def substituted() -> Iterator[None]:
    """Within, torch has these in the place of its own."""
    places: tuple[tuple[Any, str, Any], ...] = (
        (F, "embedding_bag", embedding_bag),
        (F, "ctc_loss", ctc_loss),
        (F, "gaussian_nll_loss", gaussian_nll_loss),
        (_BatchNorm, "forward", batch_norm),
        (transformer, "_detect_is_causal_mask", is_causal),
    )
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, function in places:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            setattr(owner, name, function)


# ---- what torch asks of values -------------------------------------------------------------------


def batch_norm(self: _BatchNorm, input: Tensor) -> Tensor:
    """Forward of nn.BatchNorm; with momentum=None running averages are means over all batches."""
    count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
    averages = self.training and self.track_running_stats and self.momentum is None
    if not averages or count is None or mean is None or var is None:
        return _batch_norm(self, input)
    self._check_input_dim(input)
    with torch.no_grad():
        count.add_(1)
        dims = [0, *range(2, input.dim())]
        for running, seen in zip((var, mean), torch.var_mean(input, dims), strict=True):
            running.add_((seen.to(running.dtype) - running) / count)
    return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


def is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the user says so; where nobody does, attention takes the mask as it is."""
    return is_causal is True


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """torch.nn.functional.gaussian_nll_loss.  var: of each element, or of each row."""
    if not isinstance(var, Tensor):
        return _gaussian(input, target, var, full, eps, reduction)
    torch._assert_async(~(var < 0).any(), "var has negative entry/entries")
    var = var.unsqueeze(-1) if var.shape == input.shape[:-1] else var.clone()
    unlike = sum(a != b for a, b in zip(input.shape, var.shape, strict=False))
    if var.dim() != input.dim() or unlike > 1:
        raise ValueError("var is of incorrect size")
    with torch.no_grad():
        least = var.clamp(min=eps) - var
    var = var + least
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


# ---- bags ----------------------------------------------------------------------------------------


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """torch.nn.functional.embedding_bag.  input: (bags, ids of each)."""
    unlike = offsets is not None or max_norm is not None or scale_grad_by_freq or sparse
    if input.dim() != 2 or unlike:
        return _embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    rows = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        if mode == "max":
            return rows.max(1).values
        return rows.mean(1) if mode == "mean" else rows.sum(1)
    padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        most = rows.masked_fill(padding, -torch.inf).max(1).values
        return most.masked_fill(padding.all(1), 0)
    total = rows.masked_fill(padding, 0).sum(1)
    return total / (~padding).sum(1).clamp(min=1) if mode == "mean" else total


# ---- connectionist temporal classification -------------------------------------------------------


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """torch.nn.functional.ctc_loss.  log_probs: (time, samples, classes); targets: (samples, most
    labels).
    """
    if log_probs.dim() != 3 or targets.dim() != 2:
        return _ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    lengths, labels = (
        torch.as_tensor(each, dtype=torch.int64) for each in (input_lengths, target_lengths)
    )
    made = torch.ops.flowrun.ctc_loss(
        log_probs, targets.long(), lengths, labels, blank, zero_infinity
    )
    loss: Tensor = made[0]
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0, loss)
    if reduction == "mean":
        return (loss / labels.clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss


def _define() -> torch.library.Library:
    """The op: (loss of each sample, its forward variables), with room for all labels, whatever the
    lengths.
    """
    library = torch.library.Library("flowrun", "FRAGMENT")
    tensors = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
    rest = "int blank, bool zero_infinity"
    library.define(f"ctc_loss({tensors}, {rest}) -> (Tensor, Tensor)")
    library.define(
        f"ctc_loss_backward(Tensor grad, {tensors}, Tensor loss, Tensor log_alpha, {rest})"
        " -> Tensor"
    )
    library.impl("ctc_loss", _forward, "CompositeExplicitAutograd")
    library.impl("ctc_loss_backward", _backward, "CompositeExplicitAutograd")
    torch.library.register_fake("flowrun::ctc_loss", _shapes, lib=library)
    torch.library.register_fake("flowrun::ctc_loss_backward", _shape, lib=library)
    torch.library.register_autograd(
        "flowrun::ctc_loss", _gradient, setup_context=_save, lib=library
    )
    return library


def _forward(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, labels: Tensor, blank: int, zero: bool
) -> tuple[Tensor, Tensor]:
    loss, alpha = torch.ops.aten._ctc_loss.default(
        log_probs, targets, lengths.tolist(), labels.tolist(), blank, zero
    )
    alpha = F.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[-1]))
    late = torch.arange(alpha.shape[1]) >= lengths[:, None]
    unused = torch.arange(alpha.shape[2]) > 2 * labels[:, None]
    # torch leaves there what it finds in memory
    return loss, alpha.masked_fill_(late[:, :, None] | unused[:, None], -torch.inf)


def _shapes(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, labels: Tensor, blank: int, zero: bool
) -> tuple[Tensor, Tensor]:
    time, samples, _ = log_probs.shape
    alpha = log_probs.new_empty((samples, time, 2 * targets.shape[1] + 1))
    return log_probs.new_empty(samples), alpha


def _shape(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    lengths: Tensor,
    labels: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
    zero: bool,
) -> Tensor:
    used = 2 * int(labels.max()) + 1
    gradient: Tensor = torch.ops.aten._ctc_loss_backward.default(
        grad,
        log_probs,
        targets,
        lengths.tolist(),
        labels.tolist(),
        loss,
        alpha[..., :used].contiguous(),
        blank,
        zero,
    )
    return gradient


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    made = torch.ops.flowrun.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero)
    return made, None, None, None, None, None


LIBRARY = _define()
