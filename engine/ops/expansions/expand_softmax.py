"""Softmax with its classes split: one statistic of each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowrun.engine.ir.graph import LogicalTensor, Op
from flowrun.engine.ir.sbp import P_LOGSUMEXP, P
from flowrun.engine.ops.expansions.expansion import Expansion, LaidOutValue, ReducedDims
from flowrun.engine.ops.signature import bind


def classes(op: Op, tensors: Mapping[str, LogicalTensor]) -> tuple[int, ...]:
    """The dim of the classes."""
    return (int(bind(op)["dim"]) % len(tensors[op.inputs[0]].shape),)


def _log_softmax(p: Expansion) -> None:
    """x - log(sum(exp(x)))."""
    x = p.argument("self")
    p.output(0, p.pointwise("out", "aten.sub.Tensor", x, _log_sum_exp(p, x)))


def _softmax(p: Expansion) -> None:
    """exp(x - log(sum(exp(x))))."""
    x = p.argument("self")
    log_p = p.pointwise("log_p", "aten.sub.Tensor", x, _log_sum_exp(p, x))
    p.output(0, p.pointwise("out", "aten.exp.default", log_p))


def _log_sum_exp(p: Expansion, x: LaidOutValue) -> LaidOutValue:
    return p.reduced("lse", "aten.logsumexp.default", x, P_LOGSUMEXP)


def _log_softmax_backward(p: Expansion) -> None:
    """grad - exp(output) * sum(grad)."""
    grad, output = p.argument("grad_output"), p.argument("output")
    total = p.reduced("sum", "aten.sum.dim_IntList", grad, P)
    exp = p.pointwise("exp", "aten.exp.default", output)
    share = p.pointwise("share", "aten.mul.Tensor", exp, total)
    p.output(0, p.pointwise("out", "aten.sub.Tensor", grad, share))


def _softmax_backward(p: Expansion) -> None:
    """output * (grad - sum(grad * output))."""
    grad, output = p.argument("grad_output"), p.argument("output")
    product = p.pointwise("product", "aten.mul.Tensor", grad, output)
    total = p.reduced("sum", "aten.sum.dim_IntList", product, P)
    centred = p.pointwise("centred", "aten.sub.Tensor", grad, total)
    p.output(0, p.pointwise("out", "aten.mul.Tensor", centred, output))


REDUCES: Mapping[str, tuple[str, ReducedDims]] = {
    "aten._log_softmax.default": ("self", classes),
    "aten._softmax.default": ("self", classes),
    "aten._log_softmax_backward_data.default": ("output", classes),
    "aten._softmax_backward_data.default": ("output", classes),
}

WRITE: Mapping[str, Callable[[Expansion], None]] = {
    "aten._log_softmax.default": _log_softmax,
    "aten._softmax.default": _softmax,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
}
