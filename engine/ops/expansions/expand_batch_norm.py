"""Batch norm with its batch split: statistics of each channel over all samples, wherever they lie.

Mean first, then the mean of squared distances from it: the two passes of a single device, not the
difference of two large sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowrun.engine.ir.graph import LogicalTensor, Op
from flowrun.engine.ir.sbp import P, S, Split
from flowrun.engine.ops.expansions.expansion import Expansion, LaidOutValue, ReducedDims
from flowrun.engine.ops.signature import bind


def batch(op: Op, tensors: Mapping[str, LogicalTensor]) -> tuple[int, ...]:
    """All dims but that of the channels, 1; none where the statistics are given."""
    given = bind(op)
    if not given.get("training", given.get("train")):
        return ()
    ndim = len(tensors[op.inputs[0]].shape)
    return tuple(d for d in range(ndim) if d != 1)


def _forward(p: Expansion) -> None:
    """(x - mean) / sqrt(var + eps) * weight + bias; var without Bessel's correction, but with it in
    the running one.
    """
    given = bind(p.op)
    x = p.argument("input")
    mean = p.reduced("mean", "aten.mean.dim", x, P)
    centred = p.pointwise("centred", "aten.sub.Tensor", x, mean)
    squares = p.pointwise("squares", "aten.mul.Tensor", centred, centred)
    var = p.reduced("var", "aten.mean.dim", squares, P)
    safe = p.pointwise("safe", "aten.add.Scalar", var, float(given["eps"]))
    invstd = p.pointwise("invstd", "aten.rsqrt.default", safe)
    made = p.pointwise("normed", "aten.mul.Tensor", centred, invstd)
    for name, target in (("weight", "aten.mul.Tensor"), ("bias", "aten.add.Tensor")):
        if p.has(name):
            made = p.pointwise(f"with_{name}", target, made, _along_channels(p, name, x))
    p.output(0, made)
    mean, var = _of_channels(p, "save_mean", mean), _of_channels(p, "save_var", var)
    p.output(1, mean)
    p.output(2, _of_channels(p, "save_invstd", invstd))
    if p.has("running_mean"):
        count = p.count(x)
        var = p.pointwise("unbiased", "aten.mul.Scalar", var, count / max(count - 1, 1))
        p.output(3, _moved(p, "running_mean", mean))
        p.output(4, _moved(p, "running_var", var))


def _moved(p: Expansion, name: str, towards: LaidOutValue) -> LaidOutValue:
    """(1 - momentum) * running + momentum * of this batch."""
    momentum = float(bind(p.op)["momentum"])
    kept = p.pointwise(f"{name}_kept", "aten.mul.Scalar", p.given(name), 1 - momentum)
    added = p.pointwise(f"{name}_added", "aten.mul.Scalar", towards, momentum)
    return p.pointwise(f"{name}_out", "aten.add.Tensor", kept, added)


def _backward(p: Expansion) -> None:
    """With n = (x - mean) * invstd: gradients of bias sum(g), of weight sum(g * n), of the input
    weight * invstd * (g - mean(g) - n * mean(g * n)).
    """
    grad, x = p.argument("grad_out"), p.argument("input")
    mean, invstd = _along_channels(p, "save_mean", x), _along_channels(p, "save_invstd", x)
    centred = p.pointwise("centred", "aten.sub.Tensor", x, mean)
    normed = p.pointwise("normed", "aten.mul.Tensor", centred, invstd)
    of_bias = p.reduced("sum", "aten.sum.dim_IntList", grad, P)
    product = p.pointwise("product", "aten.mul.Tensor", grad, normed)
    of_weight = p.reduced("product_sum", "aten.sum.dim_IntList", product, P)
    share = 1 / p.count(x)
    level = p.pointwise("level", "aten.mul.Scalar", of_bias, share)
    slope = p.pointwise("slope", "aten.mul.Scalar", of_weight, share)
    sloped = p.pointwise("sloped", "aten.mul.Tensor", normed, slope)
    flat = p.pointwise("flat", "aten.sub.Tensor", grad, level)
    straight = p.pointwise("straight", "aten.sub.Tensor", flat, sloped)
    scale = invstd
    if p.has("weight"):
        weight = _along_channels(p, "weight", x)
        scale = p.pointwise("scale", "aten.mul.Tensor", invstd, weight)
    p.output(0, p.pointwise("out", "aten.mul.Tensor", straight, scale))
    p.output(1, _of_channels(p, "of_weight", of_weight))
    p.output(2, _of_channels(p, "of_bias", of_bias))


def _along_channels(p: Expansion, name: str, like: LaidOutValue) -> LaidOutValue:
    """An argument of one number a channel, as it meets the input."""
    value = p.argument(name)
    shape = tuple(n if d == 1 else 1 for d, n in enumerate(like.tensor.shape))
    nd_sbp = tuple(S(1) if isinstance(sbp, Split) else sbp for sbp in value.nd_sbp)
    return p.view(f"{name}_along", value, shape, nd_sbp)


def _of_channels(p: Expansion, suffix: str, value: LaidOutValue) -> LaidOutValue:
    """A statistic as one number a channel."""
    nd_sbp = tuple(S(0) if isinstance(sbp, Split) else sbp for sbp in value.nd_sbp)
    return p.view(suffix, value, (value.tensor.shape[1],), nd_sbp)


REDUCES: Mapping[str, tuple[str, ReducedDims]] = {
    "aten._native_batch_norm_legit_functional.default": ("input", batch),
    "aten._native_batch_norm_legit.no_stats": ("input", batch),
    "aten.native_batch_norm_backward.default": ("input", batch),
}

WRITE: Mapping[str, Callable[[Expansion], None]] = {
    "aten._native_batch_norm_legit_functional.default": _forward,
    "aten._native_batch_norm_legit.no_stats": _forward,
    "aten.native_batch_norm_backward.default": _backward,
}
