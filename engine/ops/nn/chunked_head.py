"""A linear layer and its cross entropy, some rows at a time: logits are never there whole.

A loop makes the logits of a chunk, takes what it needs and drops them; backward makes them again
(as Liger's kernels, arXiv 2410.10989).  passes/head_products.py puts these two ops in place:

    flow.head_statistics((x (…, D), weight (C, D), bias (C,) or None, target (…)), how)
        -> the logit of each row's target (…, 1), lse (…, 1)
    flow.head_gradient(the same, how, (grad, lse, weight of classes, total))
        -> gradients of x, weight and bias (1, C); the weight's is summed in fp32 at least

how: (ignored class, reduction, chunks, multiple of classes in a product, dtype of lse).  A rank
has its own rows in as many chunks.  All else is as in cross_entropy.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import CostPart, OpCost, OpInfo, Trait, cost_part
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import P_LOGSUMEXP, P, S
from flowrun.engine.ir.signature import Function, LocalCall, LocalView, OpRows, OpView
from flowrun.engine.ops.math.reduce import log_sum_exp, row_bytes
from flowrun.engine.ops.nn.cross_entropy import BACKWARD, gradient_of_logits, row_of
from flowrun.engine.ops.nn.loss import NONE, of_mine

Tensor = torch.Tensor
Head = tuple[Tensor, Tensor, Tensor | None, Tensor]
How = tuple[int, int, int, int, torch.dtype]
OfLoss = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

STATISTICS, GRADIENT = "flow.head_statistics", "flow.head_gradient"
_MM = "aten.mm.default"
_NAMES = ("x", "weight", "bias", "target", "grad", "lse", "of_classes", "total")


def rows_of(view: OpView) -> OpRows:
    """Not "S(1),S(1) -> P" of a product: an exponential needs the whole sum.  Of split classes one
    rank has the logit of a target.
    """
    head, how, *rest = view.op.args
    named = dict(zip(_NAMES, (*head, *itertools.chain(*rest)), strict=False))
    each = ("grad",) if how[1] == NONE else ()
    first = view.op.target == STATISTICS
    legal = []
    for dim in map(S, range(len(view.in_shapes[0]) - 1)):
        rows = dict.fromkeys(("x", "target", "lse", *each), dim)
        legal.append(row_of(named, rows, dim, *((dim,) if first else (P, P))))
    classes = dict.fromkeys(("weight", "bias"), S(0))
    if first:
        return (*legal, row_of(named, classes, P, P_LOGSUMEXP))
    return (*legal, row_of(named, classes, P, S(0), S(1)), row_of(named, {"grad": P}, P, P, P))


def head_statistics(
    head: Head, how: How, start: int = 0, by: Function = lambda kernel, _: kernel
) -> tuple[Tensor, ...]:
    """Return the logits of targets that are here, else 0, and lse of the classes that are here.

    head, how: see the module.  start: the first class that is here.  by: (function, any stride) ->
    the kernel in its place.
    """
    (x, weight, bias, target), (ignored, *_, multiple, dtype) = head, how
    classes, padded = len(weight), _pad(weight, bias, multiple)

    def of_chunk(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = _logits(rows, *padded, by)[:, :classes]
        here, mine = of_mine(labels, start, classes, ignored)
        own = logits.gather(1, here.unsqueeze(1)).masked_fill_(~mine.unsqueeze(1), 0)
        return own, by(log_sum_exp, False)(logits, (1,), True, dtype)

    made = itertools.starmap(of_chunk, _chunks(how, x.flatten(0, -2), target.flatten()))
    return tuple(torch.cat(each).view(*target.shape, 1) for each in zip(*made, strict=True))


def head_gradient(
    head: Head,
    how: How,
    of_loss: OfLoss,
    start: int = 0,
    wanted: Sequence[bool] = (True, True, True),
    by: Function = lambda kernel, _: kernel,
) -> tuple[Tensor | None, ...]:
    """Return the gradients that are wanted, of what is here.

    head, how, of_loss: see the module.  start, by: as of head_statistics.
    """
    (x, weight, bias, target), (grad, lse, of_classes, total) = head, of_loss
    (ignored, reduction, _, multiple, _), classes = how, len(weight)
    padded, mm = _pad(weight, bias, multiple), by(torch.ops.aten.mm.default, True)
    of_x = torch.empty_like(x.flatten(0, -2))
    sums: list[Tensor | None] = [None, None]

    def add(k: int, more: Tensor) -> None:
        total = sums[k]
        wide = more.float() if more.dtype.itemsize < 4 else more
        sums[k] = wide.contiguous() if total is None else total.add_(more)

    def of_chunk(rows: Tensor, labels: Tensor, row_lse: Tensor, each: Tensor, out: Tensor) -> None:
        logits = _logits(rows, *padded, by)
        here = logits[:, :classes]
        given = (here, row_lse, labels, of_classes, reduction, ignored, total, None, start)
        by(gradient_of_logits, False)(each, *given, out=here)
        if wanted[0]:
            out.copy_(mm(logits, padded[0]))
        if wanted[1]:
            add(0, mm(logits.t(), rows))
        if wanted[2]:
            add(1, logits.sum(0, True))

    by_row = (
        x.flatten(0, -2),
        target.flatten(),
        lse.flatten(0, -2),
        grad.expand(target.shape).flatten(),
    )
    for rows, labels, row_lse, each, out in _chunks(how, *by_row, of_x):
        of_chunk(rows, labels, row_lse, each if reduction == NONE else grad, out)
    cut = (t if t is None else t.to(x.dtype).narrow(k, 0, classes) for k, t in enumerate(sums))
    return (of_x.view(x.shape) if wanted[0] else None, *cut)


def _pad(weight: Tensor, bias: Tensor | None, multiple: int) -> tuple[Tensor, Tensor | None]:
    """Add classes of zeros, whose logits and gradients are 0."""
    if not (more := -len(weight) % multiple):
        return weight, bias
    return F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))


def _chunks(how: How, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    count = min(how[2], len(tensors[0]))
    return zip(*(tensor.tensor_split(count) for tensor in tensors), strict=True)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, by: Function) -> Tensor:
    aten, first = torch.ops.aten, () if bias is None else (bias,)
    product = by(aten.addmm.default if first else aten.mm.default, False)
    return product(*first, rows, weight.t())  # type: ignore[no-any-return]


def _here(view: LocalView) -> LocalCall:
    """A rank knows the first of the classes that are here, and which gradients are read."""
    op, (start, _) = view.op, view.in_slices[1][0]
    if op.target == STATISTICS:
        return LocalCall(head_statistics, (*op.args, start))
    return LocalCall(head_gradient, (*op.args, start, tuple(map(bool, op.outputs))))


def _flops(op: Op, ins: Sequence[Shape], outs: Sequence[Shape | None]) -> float:
    """Count the product, which backward repeats, and those of gradients that are read."""
    products = 1 if op.target == STATISTICS else 1 + sum(map(bool, op.outputs[:2]))
    return 2.0 * products * math.prod(ins[0]) * ins[1][0]


def _held_bytes(op: Op, ins: Sequence[Shape], itemsize: int) -> int:
    """Logits of a chunk; with some of them in fp32, or with what it adds to the weight's gradient,
    a sum in fp32 until the end.
    """
    (*rows, _), (classes, inner) = ins[:2]
    logits = math.ceil(math.prod(rows) / int(op.args[1][2])) * classes
    sums = op.target == GRADIENT and op.outputs[1] is not None
    wide = row_bytes(logits, itemsize), sums * classes * inner * max(itemsize, 4)
    return logits * itemsize + max(wide)


def _parts(op: Op, ins: Sequence[Shape]) -> Iterator[CostPart]:
    """Yield what a whole loss does, for rows of a chunk, and how a weight's gradient adds up."""
    (*lead, inner), (classes, _) = ins[:2]
    rows, chunks, x = math.prod(lead), op.args[1][2], op.inputs[0]
    logits = few, _ = math.ceil(rows / chunks), classes

    def part(target: str, *shapes: Shape, times: float = rows / few, like: str = x) -> CostPart:
        return cost_part(op, target, times, *shapes, like=like)

    yield part(_MM, (few, inner), (inner, classes), logits)
    if op.target == STATISTICS:
        yield part("aten.logsumexp.default", logits, (few, 1))
        return
    yield part(BACKWARD, logits, logits)
    of_x, of_weight, of_bias = op.outputs
    if of_x:
        yield part(_MM, logits, (classes, inner), (few, inner))
    if of_weight:
        weight = classes, inner
        yield part(_MM, logits[::-1], (few, inner), weight)
        wide = op.args[2][1].name
        yield part("aten.add.Tensor", weight, weight, weight, times=chunks - 1, like=wide)
    if of_bias:
        yield part("aten.sum.dim_IntList", logits, (1, classes))


_KNOWN = OpInfo(
    rows_of,
    local=_here,
    traits=(Trait.PRODUCT, Trait.PLAIN, Trait.ALLOCATES),  # built code might keep several chunks
    cost=OpCost(flops=_flops, parts=_parts, held_bytes=_held_bytes),
)
OPS: Mapping[str, OpInfo] = {
    STATISTICS: replace(_KNOWN, function=head_statistics),
    GRADIENT: replace(_KNOWN, function=head_gradient),
}
