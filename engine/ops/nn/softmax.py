"""Softmax: signatures, and what it is as ordinary ops where its classes are split.

Dims other than that of the classes are independent and pass their split.  Split classes reduce one
statistic of each row: the logarithm of the sum of exponentials forward, a sum backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flowrun.engine.ir.expansion import Expansion, LaidOutValue
from flowrun.engine.ir.graph import LogicalTensor, Op
from flowrun.engine.ir.op_info import Expands, OpInfo, OutVariant, Trait
from flowrun.engine.ir.sbp import P_LOGSUMEXP, P, S
from flowrun.engine.ir.signature import OpRows, OpView, bind, places, torch_callable

aten = torch.ops.aten


def softmax(view: OpView) -> OpRows:
    """Other dims pass their split; split classes reduce one number of each row inside."""
    shape = view.in_shapes[0]
    if not shape:
        return ()
    classes, names = view.given["dim"] % len(shape), places(view.op)
    num_rows = math.prod(shape) // max(shape[classes], 1)
    return tuple(
        view.row(dict.fromkeys(names, S(d)), S(d), reduced=num_rows * (d == classes))
        for d in range(len(shape))
    )


def safe_softmax(view: OpView) -> OpRows:
    """A row of -inf gives zeros: it has no expansion, so the classes stay whole."""
    return tuple(r for r in softmax(view) if not r.reduced)


def softmax_backward(view: OpView) -> OpRows:
    """(grad_output, output): linear in the gradient; split classes reduce one sum of a row."""
    return (*softmax(view), *view.partial(("grad_output",)))


# ---- split classes as ordinary ops ---------------------------------------------------------------


def classes(op: Op, tensors: Mapping[str, LogicalTensor]) -> tuple[int, ...]:
    """The dim of the classes."""
    return (int(bind(op)["dim"]) % len(tensors[op.inputs[0]].shape),)


def expand_log_softmax(p: Expansion) -> None:
    """x - log(sum(exp(x)))."""
    x = p.argument("self")
    p.output(0, p.pointwise("out", "aten.sub.Tensor", x, _log_sum_exp(p, x)))


def expand_softmax(p: Expansion) -> None:
    """exp(x - log(sum(exp(x))))."""
    x = p.argument("self")
    log_p = p.pointwise("log_p", "aten.sub.Tensor", x, _log_sum_exp(p, x))
    p.output(0, p.pointwise("out", "aten.exp.default", log_p))


def _log_sum_exp(p: Expansion, x: LaidOutValue) -> LaidOutValue:
    return p.reduce("lse", "aten.logsumexp.default", x, P_LOGSUMEXP)


def expand_log_softmax_backward(p: Expansion) -> None:
    """grad - exp(output) * sum(grad)."""
    grad, output = p.argument("grad_output"), p.argument("output")
    total = p.reduce("sum", "aten.sum.dim_IntList", grad, P)
    exp = p.pointwise("exp", "aten.exp.default", output)
    share = p.pointwise("share", "aten.mul.Tensor", exp, total)
    p.output(0, p.pointwise("out", "aten.sub.Tensor", grad, share))


def expand_softmax_backward(p: Expansion) -> None:
    """output * (grad - sum(grad * output))."""
    grad, output = p.argument("grad_output"), p.argument("output")
    product = p.pointwise("product", "aten.mul.Tensor", grad, output)
    total = p.reduce("sum", "aten.sum.dim_IntList", product, P)
    centred = p.pointwise("centred", "aten.sub.Tensor", grad, total)
    p.output(0, p.pointwise("out", "aten.mul.Tensor", centred, output))


SOFTMAX, SOFTMAX_BACKWARD = "aten._softmax.default", "aten._softmax_backward_data.default"
SAFE_SOFTMAX, LOG_SOFTMAX = "aten._safe_softmax.default", "aten._log_softmax.default"
LOG_SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"

OPS: Mapping[str, OpInfo] = {
    SOFTMAX: OpInfo(
        softmax, traits=(Trait.ROW_STATISTICS,), expands=Expands("self", classes, expand_softmax)
    ),
    LOG_SOFTMAX: OpInfo(
        softmax,
        traits=(Trait.ALLOCATES,),
        out=OutVariant(torch_callable("aten._log_softmax.out"), along_rows=True),
        expands=Expands("self", classes, expand_log_softmax),
    ),
    SAFE_SOFTMAX: OpInfo(safe_softmax, traits=(Trait.ROW_STATISTICS,)),
    SOFTMAX_BACKWARD: OpInfo(
        softmax_backward,
        traits=(Trait.ROW_STATISTICS,),
        expands=Expands("output", classes, expand_softmax_backward),
    ),
    LOG_SOFTMAX_BACKWARD: OpInfo(
        softmax_backward,
        traits=(Trait.ALLOCATES,),
        out=OutVariant(
            torch_callable("aten._log_softmax_backward_data.out"), over=(0, 1), along_rows=True
        ),
        expands=Expands("output", classes, expand_log_softmax_backward),
    ),
}
