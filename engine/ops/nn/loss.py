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
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import (
    LocalCall,
    LocalView,
    OpView,
    Signature,
    bind,
    partial_rows,
    places,
    rebind,
    row,
)

NONE, MEAN, SUM = 0, 1, 2  # torch's `reduction`
COUNT = "flow.target_weight"  # (target (N,), weight (C,) or None, ignored class) -> scalar

# ---- negative log-likelihood ---------------------------------------------------------------------


def nll(view: OpView) -> tuple[Signature, ...]:
    """(self (N, C), target (N,)) -> (loss, total weight of the targets).

    The weight of the classes stays B, for every rank needs that of any target.
    """
    op, given = view.op, bind(view.op)
    classes = len(view.in_shapes[0]) - 1
    rows = [row(op, {"self": S(classes)}, P, B), row(op, {"self": P}, P, B)]
    if classes == 1 and given["reduction"] == SUM:
        rows.append(row(op, {"self": S(0), "target": S(0)}, P, P))
    if classes == 1 and given["reduction"] == NONE:
        rows.append(row(op, {"self": S(0), "target": S(0)}, S(0), B))
    return tuple(rows)


def nll_backward(view: OpView) -> tuple[Signature, ...]:
    """(grad_output, self, target, total_weight) -> gradient of self, whose values are not read."""
    op, given = view.op, bind(view.op)
    classes = len(view.in_shapes[1]) - 1
    rows = [row(op, {"self": S(classes)}, S(classes)), row(op, {"grad_output": P}, P)]
    if classes == 1:
        grad = S(0) if given["reduction"] == NONE else B
        rows.append(row(op, {"grad_output": grad, "self": S(0), "target": S(0)}, S(0)))
    return tuple(rows)


def target_weight(view: OpView) -> tuple[Signature, ...]:
    """A mean over targets is divided by it; a split batch gives P.  The weight of the classes stays
    B, as above.
    """
    of_targets, *of_classes = view.in_shapes
    return tuple(Signature((S(d), *(B for _ in of_classes)), (P,)) for d in range(len(of_targets)))


def nll_2d(view: OpView) -> tuple[Signature, ...]:
    """(self (N, C, H, W), target (N, H, W)) -> (loss, total weight of the targets).

    Classes stay whole.  A mean has no split: simplify.py makes a sum and a division of it.
    """
    op, reduction = view.op, bind(view.op)["reduction"]
    split = [({"self": S(d and d + 1), "target": S(d)}, S(d)) for d in range(3)]
    rows = [row(op, {"self": P}, P, B)]
    if reduction == SUM:
        rows += [row(op, given, P, P) for given, _ in split]
    if reduction == NONE:
        rows += [row(op, given, output, B) for given, output in split]
    return tuple(rows)


def nll_2d_backward(view: OpView) -> tuple[Signature, ...]:
    """(grad_output, self, target, total_weight) -> gradient of self, whose values are not read."""
    op, none = view.op, bind(view.op)["reduction"] == NONE
    rows = [row(op, {"grad_output": P}, P)]
    for d in range(3):
        inner = S(d and d + 1)
        grad = S(d) if none else B
        rows.append(row(op, {"grad_output": grad, "self": inner, "target": S(d)}, inner))
    return tuple(rows)


def of_mine(
    target: torch.Tensor, start: int, count: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (class of each target counted from `start`, 0 where it is not here; whether it is
    here).

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


def local_nll(view: LocalView) -> LocalCall:
    """The op itself where all classes are here."""
    return _over_classes(view, 0, nll_of_classes)


def local_nll_backward(view: LocalView) -> LocalCall:
    """The op itself where all classes are here."""
    return _over_classes(view, 1, nll_gradient_of_classes)


def _over_classes(view: LocalView, at: int, program: object) -> LocalCall:
    start, count = view.in_slices[at][-1]
    if count == view.in_shapes[at][-1]:
        return rebind(view.op)
    assert callable(program)
    return LocalCall(program, (*bind(view.op).values(), start))


# ---- squared error -------------------------------------------------------------------------------


def mse(view: OpView) -> tuple[Signature, ...]:
    """A mean is this rank's sum divided by the logical count."""
    op = view.op
    none = bind(op)["reduction"] == NONE
    return tuple(
        row(op, {"self": S(d), "target": S(d)}, S(d) if none else P)
        for d in _alike(view, "self", "target")
    )


def mse_backward(view: OpView) -> tuple[Signature, ...]:
    """2 (self - target) grad: linear in the gradient, and in self and target together."""
    op = view.op
    none = bind(op)["reduction"] == NONE
    return (
        *(
            row(op, {"grad_output": S(d) if none else B, "self": S(d), "target": S(d)}, S(d))
            for d in _alike(view, "self", "target")
        ),
        *partial_rows(op, ("grad_output",), ("self", "target")),
    )


def _alike(view: OpView, *names: str) -> range:
    """Dims that can be split alike: all, if no operand is broadcast."""
    shapes = [
        shape for name, shape in zip(places(view.op), view.in_shapes, strict=True) if name in names
    ]
    return range(len(shapes[0])) if shapes.count(shapes[0]) == len(shapes) else range(0)


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
    """Return the gradient of x for a mean of squares of x - y over `total` elements; grad: of the
    mean.
    """
    return (x - y).mul_(2 * grad / total)


def local_mse(view: LocalView) -> LocalCall:
    """The op itself, but for a mean."""
    op = view.op
    if bind(op)["reduction"] != MEAN:
        return rebind(op)
    return LocalCall(part_of_mse, (*op.args[:2], math.prod(view.in_shapes[0])))


def local_mse_backward(view: LocalView) -> LocalCall:
    """The op itself, but for a mean."""
    op = view.op
    if bind(op)["reduction"] != MEAN:
        return rebind(op)
    return LocalCall(part_of_mse_gradient, (*op.args[:3], math.prod(view.in_shapes[1])))


NLL, NLL_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"
NLL_2D = "aten.nll_loss2d_forward.default"
_LABELS = LookUp(
    table="self", ids="target", dim=1, words=LABELS, ignored="ignore_index", by_mask=True
)

OPS: Mapping[str, OpInfo] = {
    NLL: OpInfo(nll, local=local_nll, traits=(Trait.ALLOCATES,), looks_up=_LABELS),
    NLL_BACKWARD: OpInfo(nll_backward, local=local_nll_backward, traits=(Trait.ALLOCATES,)),
    NLL_2D: OpInfo(nll_2d, looks_up=_LABELS),
    "aten.nll_loss2d_backward.default": OpInfo(nll_2d_backward),
    COUNT: OpInfo(target_weight, function=weight_of_targets),
    "aten.mse_loss.default": OpInfo(mse, local=local_mse),
    "aten.mse_loss_backward.default": OpInfo(mse_backward, local=local_mse_backward),
}
