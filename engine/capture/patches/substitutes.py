"""substitutes: functions of torch.nn that are written otherwise while a model is captured.

Each computes what torch's function computes.  Two are written so that samples stay independent:

    embedding_bag   bags of equal length: look-ups and a reduction, not offsets into one long list
    ctc_loss        lengths as tensors: the size of a result of torch's op depends on their values

Others are written so that they do not look at values, which capture does not know:

    batch_norm          momentum=None: the weight of a batch is 1 / batches so far, as a tensor
    is_causal           of a Transformer's mask: torch compares it with the causal one, for speed
    gaussian_nll_loss   an assert on tensors looks for negative variances (run by engine.check)
    positive_definite, positive_semidefinite   of torch.distributions: all of the check at once

One is written as a draw that the engine has:

    multinomial         a race of exponential numbers, as torch's own kernel runs it

One computes in another dtype, and does so outside of capture, too:

    embedding           under autocast rows of an fp32 table become narrow (narrow_residual)

Relied upon of torch (tests/engine/capture/patches/test_substitutes.py): modules call these
functions by their names in torch.nn.functional and torch.nn.modules.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from flowrun.engine import torch_internals
from flowrun.engine.torch_internals import CAUSAL_MASK_DETECTOR, BatchNorm, assert_async

_embedding_bag, _ctc_loss, _gaussian = F.embedding_bag, F.ctc_loss, F.gaussian_nll_loss
_embedding = F.embedding
_batch_norm = BatchNorm.forward


@contextlib.contextmanager
def replace_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Within the block, attribute `name` of a module or class (`owner`) is `value`."""
    before = inspect.getattr_static(owner, name)  # a static method as one
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def replace_functions() -> Iterator[None]:
    """Within the block, torch calls the functions of this file in place of its own."""
    with (
        replace_attribute(F, "embedding_bag", embedding_bag),
        replace_attribute(F, "ctc_loss", ctc_loss),
        replace_attribute(F, "gaussian_nll_loss", gaussian_nll_loss),
        replace_attribute(BatchNorm, "forward", batch_norm),
        replace_attribute(torch, "multinomial", multinomial),
        replace_attribute(Tensor, "multinomial", multinomial),
        replace_attribute(*CAUSAL_MASK_DETECTOR, is_causal),
        replace_attribute(type(constraints.positive_definite), "check", _is_definite),
        replace_attribute(type(constraints.positive_semidefinite), "check", _is_semidefinite),
    ):
        yield


@contextlib.contextmanager
def narrow_residual(narrow: bool) -> Iterator[None]:
    """Within the block, if `narrow`, what a model looks up has autocast's dtype where that is on.

    So has every sum of it and narrow results: the residual stream of a transformer, which FSDP and
    Megatron-LM keep narrow as their weights are.  autocast alone leaves it in fp32.
    """
    if not narrow:
        yield
        return
    with replace_attribute(F, "embedding", _embed_narrow), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # of rms_norm
        yield


def _embed_narrow(*args: Any, **options: Any) -> Tensor:
    rows: Tensor = _embedding(*args, **options)
    device = rows.device.type
    narrow = torch.is_autocast_enabled(device) and rows.dtype == torch.float32
    return rows.to(torch.get_autocast_dtype(device)) if narrow else rows


# ---- functions that look at values ---------------------------------------------------------------


def batch_norm(self: BatchNorm, input: Tensor) -> Tensor:
    """Compute nn.BatchNorm.forward; with momentum=None the running averages are cumulative."""
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
    """Return whether the user states `is_causal`; `mask` and `size` are not looked at.

    If the user states nothing, attention takes the mask itself.
    """
    return is_causal is True


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute torch.nn.functional.gaussian_nll_loss.

    input, target: expectations and samples of one shape.  var: variance of each element or of each
    row.  full: add the constant term.  eps: least variance.  reduction: none, mean or sum.  Raise
    ValueError for a `var` of another shape.
    """
    if not isinstance(var, Tensor):
        return _gaussian(input, target, var, full, eps, reduction)
    assert_async(~(var < 0).any(), "var has negative entry/entries")
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
    """Compute torch.nn.functional.embedding_bag: look-ups and a reduction for bags of equal length.

    input: (bags, ids of a bag).  weight: (rows, width).  mode: sum, mean or max.
    per_sample_weights: shaped as input.  padding_idx: an id that does not count.  torch's own
    function runs for another shape of input, with offsets (and include_last_offset), max_norm (and
    norm_type), scale_grad_by_freq or sparse.
    """
    only_torch = offsets is not None or max_norm is not None or scale_grad_by_freq or sparse
    if input.dim() != 2 or only_torch:
        how = (offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse)
        rest = (per_sample_weights, include_last_offset, padding_idx)
        return _embedding_bag(input, weight, *how, *rest)
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


def multinomial(
    weights: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Compute torch.multinomial: weights over exponential numbers, of which the largest win."""
    if replacement:
        weights = weights[..., None, :].expand(*weights.shape[:-1], num_samples, -1)
    raced = weights / torch.empty(weights.shape).exponential_(generator=generator)
    return raced.argmax(-1) if replacement else raced.topk(num_samples, -1).indices


def _is_definite(_: object, value: Tensor) -> Tensor:
    """Compute constraints.positive_definite.check."""
    factored: Tensor = torch.linalg.cholesky_ex(value).info == 0
    return factored.logical_and(constraints.symmetric.check(value))


def _is_semidefinite(_: object, value: Tensor) -> Tensor:
    """Compute constraints.positive_semidefinite.check."""
    positive: Tensor = (torch.linalg.eigvalsh(value) >= 0).all(-1)
    return positive.logical_and(constraints.symmetric.check(value))


@dataclass(frozen=True, eq=False, slots=True)
class Picked:
    """The elements that a mask picks of a matrix, row after row.

    Their number depends on the mask's values, so that this has no shape.  CTC alone takes it, whose
    lengths say how many each row has.
    """

    values: Tensor
    mask: Tensor

    def in_rows(self, lengths: object) -> Tensor:
        """Return (rows, columns): each row begins with what it has picked, zeros follow.

        lengths: must have been made of the mask.
        """
        if getattr(lengths, COUNTED, None) is not self.mask:
            raise TypeError("the lengths of what a mask picks are not mask.sum(-1)")
        rows, columns = self.mask.shape
        place = torch.where(self.mask, self.mask.cumsum(1) - 1, columns)
        wide = self.values.new_zeros(rows, columns + 1).scatter(1, place, self.values)
        return wide[:, :columns]


COUNTED = "flowrun_counted"  # attribute of a sum: the mask whose rows it counts


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor | Picked,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute torch.nn.functional.ctc_loss with lengths as tensors.

    log_probs: (time, samples, classes).  targets: (samples, longest target), or what a mask of that
    shape picks.  input_lengths, target_lengths: (samples,).  blank: class of the blank.  reduction:
    none, mean or sum.
    zero_infinity: replace infinite losses by 0.  torch's own function runs for other shapes.
    """
    ends = (input_lengths, target_lengths)
    if isinstance(targets, Picked):
        targets = targets.in_rows(target_lengths)
    if log_probs.dim() != 3 or targets.dim() != 2:
        return _ctc_loss(log_probs, targets, *ends, blank, reduction, zero_infinity)
    lengths, labels = (torch.as_tensor(each, dtype=torch.int64) for each in ends)
    wide = log_probs.float() if log_probs.itemsize < 4 else log_probs  # as under autocast
    given = (wide, targets.long(), lengths, labels, blank, zero_infinity)
    loss: Tensor = torch.ops.flowrun.ctc_loss(*given)[0]
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0, loss)
    if reduction == "mean":
        return (loss / labels.clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss


@torch.library.custom_op("flowrun::ctc_loss", mutates_args=())
def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample, and forward variables with room for the longest target."""
    loss, alpha = torch_internals.ctc_loss(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, zero_infinity
    )
    alpha = F.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[-1]))
    late = torch.arange(alpha.shape[1]) >= input_lengths[:, None]
    unused = torch.arange(alpha.shape[2]) > 2 * target_lengths[:, None]
    # torch leaves these elements uninitialised
    return loss, alpha.masked_fill_(late[:, :, None] | unused[:, None], -torch.inf)


@torch.library.custom_op("flowrun::ctc_loss_backward", mutates_args=())
def _gradient_of_losses(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = (input_lengths.tolist(), target_lengths.tolist())
    used = log_alpha[..., : 2 * int(target_lengths.max()) + 1].contiguous()
    gradient: Tensor = torch_internals.ctc_loss_backward(
        grad, log_probs, targets, *lengths, loss, used, blank, zero_infinity
    )
    return gradient


@_losses.register_fake
def _fake_losses(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    time, samples, _classes = log_probs.shape
    alpha = log_probs.new_empty((samples, time, 2 * targets.shape[1] + 1))
    return log_probs.new_empty(samples), alpha


@_gradient_of_losses.register_fake
def _fake_gradient(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(log_probs)


def _save(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.flowrun.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero)
    return gradients, None, None, None, None, None


_losses.register_autograd(_backward, setup_context=_save)
