"""Cross entropy of logits: `flow.cross_entropy` and `flow.cross_entropy_backward`.

What log_softmax and a negative log-likelihood are together (kept_logits.py puts these two in their
place), without log-probabilities: of each row of logits one number is kept, the logarithm of
the sum of its exponentials, and the gradient is made of logits, that number and the target at once.
Where classes are split, that number is all of a row that travels (P(logsumexp) -> B).

    flow.log_sum_exp(x (…, C), (last dim,), True, dtype) -> lse, wider than x
    flow.cross_entropy(x (…, C), lse (…, 1), target (…), weight, reduction, ignored)
        -> (loss, weight of the targets)
    flow.cross_entropy_backward(grad, x, lse, target, weight, reduction, ignored, total, loss)
        -> gradient of x

Of one class alone the target is that class: then x has the logit of each row's target, which
where classes were split is a sum over ranks (chunked_head.py).

Logits may be narrower than `lse`, whose dtype losses have; their gradient is as narrow, rounded
once.  total: the weight of the targets, for a mean alone; else None.  loss: not looked at; where
passes/count_targets.py names it, it is there before, so that the gradient may be written over
logits that nobody will read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowrun.engine.ir.graph import Op, Ref
from flowrun.engine.ir.op_info import LABELS, LookUp, OpInfo, OutVariant, Trait
from flowrun.engine.ir.sbp import P_LOGSUMEXP, B, P, S, Sbp
from flowrun.engine.ir.signature import LocalCall, LocalView, OpRows, OpView, Signature
from flowrun.engine.ops.math.reduce import COST_OF_LSE, LOG2_E, log_sum_exp
from flowrun.engine.ops.nn.loss import NONE, SUM, divisor, of_mine, reduced_loss, weights_of

Tensor = torch.Tensor

FORWARD, BACKWARD = "flow.cross_entropy", "flow.cross_entropy_backward"
LOG_SUM_EXP = "flow.log_sum_exp"
_GIVEN = ("x", "lse", "target", "weight", "reduction", "ignored")
_GIVEN_BACKWARD = ("grad", *_GIVEN, "total", "loss")


def rows_of_log_sum_exp(view: OpView) -> OpRows:
    """Rows are those of aten.logsumexp over the last dim."""
    classes = len(view.in_shapes[0]) - 1
    rows = (Signature((S(d),), (S(d),)) for d in range(classes))
    return *rows, Signature((S(classes),), (P_LOGSUMEXP,))


def rows_of_forward(view: OpView) -> OpRows:
    """Split classes: a rank adds what the targets among its own lose."""
    named, (*rows, count) = given(view.op), view.in_shapes[0]
    classes: dict[str, Sbp] = {"x": S(len(rows))} if count > 1 else {"x": P, "lse": P}
    legal, how = [row_of(named, classes, P, B)], named["reduction"]
    for d in range(len(rows) if how in (SUM, NONE) else 0):
        outputs = (P, P) if how == SUM else (S(d), B)
        of_rows: dict[str, Sbp] = dict.fromkeys(("x", "lse", "target"), S(d))
        legal.append(row_of(named, of_rows, *outputs))
    return tuple(legal)


def rows_of_backward(view: OpView) -> OpRows:
    """Linear in the gradient; whose rows are those of the logits where the loss was not reduced.

    The loss is waited for and not read: its partial sum will do.
    """
    named, rows = given(view.op), len(view.in_shapes[1]) - 1
    each = named["reduction"] == NONE
    cases: list[tuple[dict[str, Sbp], Sbp]] = [({"x": S(rows)}, S(rows))]
    for d in range(rows):
        of_rows: dict[str, Sbp] = {"x": S(d), "lse": S(d), "target": S(d)}
        cases.append(({**of_rows, "grad": S(d) if each else B}, S(d)))
    cases.append(({"grad": P}, P))
    return tuple(
        row_of(named, {**sbps, "loss": loss}, output) for sbps, output in cases for loss in (B, P)
    )


def given(op: Op) -> dict[str, Any]:
    """Arguments of one of the two ops by name, in order."""
    names = _GIVEN if op.target == FORWARD else _GIVEN_BACKWARD
    return dict(zip(names, op.args, strict=True))


def row_of(named: Mapping[str, object], sbps: Mapping[str, Sbp], *outputs: Sbp) -> Signature:
    """Return a row: SBPs of the tensors among arguments by name, B for others; then of outputs."""
    read = (name for name, argument in named.items() if isinstance(argument, Ref))
    return Signature(tuple(sbps.get(name, B) for name in read), outputs)


# ---- local programs ------------------------------------------------------------------------------


def loss_of_logits(
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    start: int = 0,
    classes: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return this rank's addend of the loss, and the whole weight of the targets.

    x, lse, target, weight, reduction, ignored: see the module.
    start: the first of the classes that are here.  classes: of all ranks; 0: these.
    """
    here, mine = of_mine(target, start, x.shape[-1], ignored)
    if (classes or x.shape[-1]) == 1:
        here, mine = torch.zeros_like(target), target != ignored
    each = weights_of(lse, target, weight, ignored)
    picked = x.gather(-1, here.unsqueeze(-1)).to(lse.dtype)
    loss = torch.where(mine, (lse - picked).squeeze(-1) * each, 0)  # what stands in may be masked
    return reduced_loss(loss, each, reduction)


def gradient_of_logits(
    grad: Tensor,
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor | None,
    loss: Tensor | None,
    start: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return (softmax - 1 at the target) x what the row's loss counts; powers of two as in
    log_sum_exp.

    grad, x, lse, target, weight, reduction, ignored, total, loss: see the module.
    start: the first of the classes that are here.
    out: where it is written; may be x.
    """
    here, mine = of_mine(target, start, x.shape[-1], ignored)
    each = (grad * weights_of(lse, target, weight, ignored)).unsqueeze(-1)
    each = each if total is None else each / divisor(total)
    if out is None and not x.is_cpu:
        return compare_with_target(x, lse, here, mine, each).to(x.dtype)
    result = torch.sub(x.to(lse.dtype), lse, out=out if x.dtype == lse.dtype else None)
    result.mul_(LOG2_E).exp2_().mul_(each)
    result.scatter_add_(-1, here.unsqueeze(-1), -each * mine.unsqueeze(-1))
    return result.to(x.dtype) if out is None or out is result else out.copy_(result)


def compare_with_target(x: Tensor, lse: Tensor, here: Tensor, mine: Tensor, each: Tensor) -> Tensor:
    """Return the gradient of logits, as wide as lse, by comparing each class with the target.

    Compiled regions make one kernel of it, its cast to low precision included.
    x, lse: as of gradient_of_logits.  here, mine: see of_mine.  each: (…, 1), what a row counts.
    """
    classes = torch.arange(x.shape[-1], device=x.device)
    at_target = (classes == here.unsqueeze(-1)) & mine.unsqueeze(-1)
    return (((x.to(lse.dtype) - lse) * LOG2_E).exp2() - at_target.to(lse.dtype)) * each


def _here(view: LocalView) -> LocalCall:
    """A rank looks at the classes that are here."""
    at = view.op.inputs.index(given(view.op)["x"].name)
    args, classes = (*view.op.args, view.in_slices[at][-1][0]), view.in_shapes[at][-1]
    if view.op.target == BACKWARD:
        return LocalCall(gradient_of_logits, args)
    return LocalCall(loss_of_logits, (*args, classes))


OPS: Mapping[str, OpInfo] = {
    LOG_SUM_EXP: OpInfo(
        rows_of_log_sum_exp, function=log_sum_exp, traits=(Trait.ALLOCATES,), cost=COST_OF_LSE
    ),
    FORWARD: OpInfo(
        rows_of_forward,
        local=_here,
        function=loss_of_logits,
        arguments=_GIVEN,
        looks_up=LookUp(
            table="x", ids="target", dim=1, words=LABELS, ignored="ignored", by_mask=True
        ),
        traits=(Trait.ALLOCATES,),
    ),
    BACKWARD: OpInfo(
        rows_of_backward,
        local=_here,
        function=gradient_of_logits,
        arguments=_GIVEN_BACKWARD,
        traits=(Trait.ALLOCATES,),
        out=OutVariant(gradient_of_logits, over=(1,)),
    ),
}
