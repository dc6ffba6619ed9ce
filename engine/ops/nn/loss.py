"""Signatures and local programs of losses.

Classes stay split through the loss: softmax reduces a statistic inside (softmax.py), the
negative log-likelihood looks up what it has, so no logits travel (Megatron-LM's vocabulary-parallel
cross entropy, arXiv 1909.08053, section 3). Not "S(0),S(0) -> P" for a mean: each rank would divide
by its own count.  A mean is a sum and a count, divided afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flowrun.engine.ir.op_info import LABELS, LookUp, OpInfo, Trait
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import (
    Function,
    Local,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Signature,
)

NONE, MEAN, SUM = 0, 1, 2  # torch's `reduction`
COUNT = "flow.target_weight"  # (target (N,), weight (C,) or None, ignored class) -> scalar

# ---- negative log-likelihood ---------------------------------------------------------------------


def nll(view: OpView) -> OpRows:
    """(self (N, C, …), target (N, …)) -> (loss, total weight of the targets).

    The weight of the classes stays B, for every rank needs that of any target.  A mean has no split
    of targets: simplify.py makes a sum and a division of it.  Classes of images stay whole.
    """
    of_self, of_target, *_ = view.in_shapes
    rows = [view.row({"self": P}, P, B)]
    if len(of_self) <= 2:
        rows.insert(0, view.row({"self": S(len(of_self) - 1)}, P, B))
    if (reduction := view.given["reduction"]) != MEAN:
        for d in range(len(of_target)):
            outputs = (P, P) if reduction == SUM else (S(d), B)
            rows.append(view.row(_split_targets(d), *outputs))
    return tuple(rows)


def _split_targets(d: int) -> dict[str, Sbp]:
    return {"self": S(d and d + 1), "target": S(d)}


def nll_backward(view: OpView) -> OpRows:
    """(grad_output, self, target, total_weight) -> gradient of self, whose values are not read."""
    _, of_self, of_target, *_ = view.in_shapes
    rows = [view.row({"grad_output": P}, P)]
    if len(of_self) <= 2:
        rows.insert(0, view.row({"self": S(len(of_self) - 1)}, S(len(of_self) - 1)))
    for d in range(len(of_target)):
        split = _split_targets(d)
        grad = S(d) if view.given["reduction"] == NONE else B
        rows.append(view.row({"grad_output": grad, **split}, split["self"]))
    return tuple(rows)


def target_weight(view: OpView) -> OpRows:
    """A mean over targets is divided by it; the weight of the classes stays B, as above."""
    of_targets, *of_classes = view.in_shapes
    return tuple(Signature((S(d), *(B for _ in of_classes)), (P,)) for d in range(len(of_targets)))


def of_mine(
    target: torch.Tensor, start: int, count: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (class of each target, counted from `start`, or 0; whether it is here).

    start, count: the classes that are here.  ignored: a target that counts for nothing.
    """
    here = target - start
    mine = (here >= 0) & (here < count) & (target != ignored)
    return here.masked_fill(~mine, 0), mine


def weights_of(
    like: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int
) -> torch.Tensor:
    """Return the weight of each target's class, 0 where the target is ignored.

    weight: of the classes (C,); None: all 1.
    """
    counted = target != ignored
    if weight is None:
        return counted.to(like.dtype)
    return weight[target.masked_fill(~counted, 0)] * counted


def weight_of_targets(
    target: torch.Tensor, weight: torch.Tensor | None, ignored: int, *, dtype: torch.dtype
) -> torch.Tensor:
    """Sum weights_of: how many targets count, where classes have no weight.

    target, weight, ignored: as there.
    """
    return weights_of(target.new_empty(0, dtype=dtype), target, weight, ignored).sum()


def nll_of_classes(
    log_p: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's addend of the loss, and the whole weight of the targets.

    log_p: of the classes that are here, from `start` on.
    target, weight, reduction, ignored: as of aten.nll_loss_forward.
    """
    here, mine = of_mine(target, start, log_p.shape[-1], ignored)
    each = weights_of(log_p, target, weight, ignored)
    picked = log_p.gather(-1, here.unsqueeze(-1)).squeeze(-1)
    loss = torch.where(mine, -picked * each, 0)  # what stands in for a class elsewhere may be -inf
    return reduced_loss(loss, each, reduction)


def reduced_loss(
    loss: torch.Tensor, each: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, weight of the targets) as torch's op returns them.

    loss, each: those of a row.  reduction: NONE, MEAN or SUM.
    """
    total = each.sum()
    if reduction == NONE:
        return loss, torch.zeros_like(total)
    loss = loss.sum()
    return (loss / total if reduction == MEAN else loss), total


def divisor(total: torch.Tensor) -> torch.Tensor:
    """Return `total`, by which gradients of a mean are divided, or 1 where it is 0.

    If every target is ignored there is nothing to divide: each gradient is 0, as torch's kernels
    leave it, not 0 / 0.
    """
    return torch.where(total == 0, 1, total)


def nll_gradient_of_classes(
    grad: torch.Tensor,
    log_p: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
    start: int,
) -> torch.Tensor:
    """Return the gradient of log_p, of the classes that are here, from `start` on.

    grad, target, weight, reduction, ignored, total: as of aten.nll_loss_backward.
    """
    here, mine = of_mine(target, start, log_p.shape[-1], ignored)
    value = -grad * weights_of(log_p, target, weight, ignored) * mine
    if reduction == MEAN:
        value = value / divisor(total)
    return torch.zeros_like(log_p).scatter_(-1, here.unsqueeze(-1), value.unsqueeze(-1))


def _over_classes(at: int, program: Function) -> Local:
    """The op itself where all classes are here.  at: the input that has them."""

    def local(view: LocalView) -> LocalCall:
        start, count = view.in_slices[at][-1]
        if count == view.in_shapes[at][-1]:
            return view.rebind()
        return LocalCall(program, (*view.given.values(), start))

    return local


# ---- squared error -------------------------------------------------------------------------------


def mse(view: OpView) -> OpRows:
    """A mean is this rank's sum divided by the logical count."""
    none = view.given["reduction"] == NONE
    return tuple(
        view.row({"self": S(d), "target": S(d)}, S(d) if none else P) for d in _alike(view)
    )


def mse_backward(view: OpView) -> OpRows:
    """2 (self - target) grad: linear in the gradient, and in self and target together."""
    none = view.given["reduction"] == NONE
    split = (
        view.row({"grad_output": S(d) if none else B, "self": S(d), "target": S(d)}, S(d))
        for d in _alike(view)
    )
    return (*split, *view.partial(("grad_output",), ("self", "target")))


def _alike(view: OpView) -> range:
    """Dims that can be split alike: all, if neither self nor target is broadcast."""
    one, other = view.in_shapes[-2:]
    return range(len(one) if one == other else 0)


def part_of_mse(x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
    """Return this rank's addend of the mean of squares of x - y over `total` elements.

    A sum of 16-bit numbers leaves what fp16 can hold.
    """
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    squares = torch.ops.aten.mse_loss.default(x.to(wide), y.to(wide), SUM)
    return squares.div_(total).to(dtype)  # type: ignore[no-any-return]


def part_of_mse_gradient(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, total: int
) -> torch.Tensor:
    """Return the gradient of x; grad: of the mean of squares of x - y over `total` elements."""
    return (x - y).mul_(2 * grad / total)


def _unless_mean(program: Function) -> Local:
    """The op itself, but for a mean."""

    def local(view: LocalView) -> LocalCall:
        if view.given["reduction"] != MEAN:
            return view.rebind()
        tensors = view.op.args[: len(view.op.inputs)]
        return LocalCall(program, (*tensors, math.prod(view.in_shapes[-2])))

    return local


# ---- connectionist temporal classification (substitutes.py): samples are independent -------------

_OF_SAMPLES = dict.fromkeys(("targets", "input_lengths", "target_lengths"), S(0))


def ctc(view: OpView) -> OpRows:
    """log_probs (time, samples, classes) -> loss (samples,), log_alpha (samples, time, …)."""
    return (view.row({"log_probs": S(1), **_OF_SAMPLES}, S(0)),)


def ctc_backward(view: OpView) -> OpRows:
    """Linear in the gradient."""
    given = dict.fromkeys(("grad", "loss", "log_alpha"), S(0))
    split = view.row({"log_probs": S(1), **_OF_SAMPLES, **given}, S(1))
    return (split, *view.partial(("grad",)))


NLL, NLL_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"
NLL_2D = "aten.nll_loss2d_forward.default"
_LABELS = LookUp(
    table="self", ids="target", dim=1, words=LABELS, ignored="ignore_index", by_mask=True
)

OPS: Mapping[str, OpInfo] = {
    NLL: OpInfo(
        nll, local=_over_classes(0, nll_of_classes), traits=(Trait.ALLOCATES,), looks_up=_LABELS
    ),
    NLL_BACKWARD: OpInfo(
        nll_backward, local=_over_classes(1, nll_gradient_of_classes), traits=(Trait.ALLOCATES,)
    ),
    NLL_2D: OpInfo(nll, looks_up=_LABELS),
    "aten.nll_loss2d_backward.default": OpInfo(nll_backward),
    COUNT: OpInfo(target_weight, function=weight_of_targets),
    "aten.mse_loss.default": OpInfo(mse, local=_unless_mean(part_of_mse)),
    "aten.mse_loss_backward.default": OpInfo(
        mse_backward, local=_unless_mean(part_of_mse_gradient)
    ),
    "flowrun.ctc_loss.default": OpInfo(ctc),
    "flowrun.ctc_loss_backward.default": OpInfo(ctc_backward),
}
