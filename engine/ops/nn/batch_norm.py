"""Signatures of batch norm.  Tensors are (samples, channels, …).

Channels are independent of each other.  In training a statistic of a channel is over all samples:
a split of those is legal, and reduces two numbers a channel inside (below).  Not
"S(0) -> S(0)" with each rank's own statistics: that is another function (`view: mirrored`).  With
given statistics (evaluation, a frozen norm) all dims are independent.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ir.expansion import Expansion, LaidOutValue
from flowrun.engine.ir.graph import LogicalTensor, Op
from flowrun.engine.ir.op_info import Expands, OpInfo, Trait
from flowrun.engine.ir.sbp import B, P, S, Split
from flowrun.engine.ir.signature import OpRows, OpView, Signature, bind, places

_WHOLE = ("grad_out", "input")


def _channels(view: OpView, *outputs: int) -> Signature:
    """The channels split; outputs: dims of the channels."""
    given = {name: S(1 if name in _WHOLE else 0) for name in places(view.op)}
    return view.row(given, *(S(d) if d >= 0 else B for d in outputs))


def _samples(view: OpView) -> list[int]:
    """The dims over which statistics are, if the op is to make them."""
    return [d for d in range(len(view.in_shapes[0])) if d != 1]


def forward(view: OpView) -> OpRows:
    """-> (out, mean, invstd, the two running statistics)."""
    rest = len(view.op.outputs) - 1
    reduced = 2 * view.in_shapes[0][1] if view.given["training"] else 0
    rows = [view.row({"input": S(d)}, S(d), *(B,) * rest, reduced=reduced) for d in _samples(view)]
    return (_channels(view, 1, *(0,) * rest), *rows)


def given_statistics(view: OpView) -> OpRows:
    """-> (out, two outputs of no elements)."""
    rows = (view.row({"input": S(d)}, S(d), B, B) for d in _samples(view))
    return (_channels(view, 1, -1, -1), *rows)


def backward(view: OpView) -> OpRows:
    """-> gradients of (input, weight, bias).  The last two are what the ranks reduce inside."""
    reduced, over = (2 * view.in_shapes[0][1], B) if view.given["train"] else (0, P)
    rows = [
        view.row(dict.fromkeys(_WHOLE, S(d)), S(d), over, over, reduced=reduced)
        for d in _samples(view)
    ]
    return (_channels(view, 1, 0, 0), *rows, *view.partial(("grad_out",)))


# ---- split samples as ordinary ops ---------------------------------------------------------------
#
# Mean first, then the mean of squared distances from it: the two passes of a single device, not the
# difference of two large sums.


def batch(op: Op, tensors: Mapping[str, LogicalTensor]) -> tuple[int, ...]:
    """All dims but that of the channels, 1; none where the statistics are given."""
    given = bind(op)
    if not given.get("training", given.get("train")):
        return ()
    ndim = len(tensors[op.inputs[0]].shape)
    return tuple(d for d in range(ndim) if d != 1)


def expand_forward(p: Expansion) -> None:
    """(x - mean) / sqrt(var + eps) * weight + bias; Bessel's correction in running_var alone."""
    given = bind(p.op)
    x = p.argument("input")
    mean = p.reduce("mean", "aten.mean.dim", x, P)
    centred = p.pointwise("centred", "aten.sub.Tensor", x, mean)
    squares = p.pointwise("squares", "aten.mul.Tensor", centred, centred)
    var = p.reduce("var", "aten.mean.dim", squares, P)
    safe = p.pointwise("safe", "aten.add.Scalar", var, float(given["eps"]))
    invstd = p.pointwise("invstd", "aten.rsqrt.default", safe)
    normed = p.pointwise("normed", "aten.mul.Tensor", centred, invstd)
    for name, target in (("weight", "aten.mul.Tensor"), ("bias", "aten.add.Tensor")):
        if p.has(name):
            normed = p.pointwise(f"with_{name}", target, normed, _along_channels(p, name, x))
    p.output(0, normed)
    mean, var = _of_channels(p, "save_mean", mean), _of_channels(p, "save_var", var)
    p.output(1, mean)
    p.output(2, _of_channels(p, "save_invstd", invstd))
    if p.has("running_mean"):
        count = p.count(x)
        var = p.pointwise("unbiased", "aten.mul.Scalar", var, count / max(count - 1, 1))
        p.output(3, _move(p, "running_mean", mean))
        p.output(4, _move(p, "running_var", var))


def _move(p: Expansion, name: str, towards: LaidOutValue) -> LaidOutValue:
    """(1 - momentum) * running + momentum * of this batch."""
    momentum = float(bind(p.op)["momentum"])
    kept = p.pointwise(f"{name}_kept", "aten.mul.Scalar", p.given(name), 1 - momentum)
    added = p.pointwise(f"{name}_added", "aten.mul.Scalar", towards, momentum)
    return p.pointwise(f"{name}_out", "aten.add.Tensor", kept, added)


def expand_backward(p: Expansion) -> None:
    """Write the gradients.  With n = (x - mean) * invstd: of bias sum(g), of weight sum(g * n), of
    the input weight * invstd * (g - mean(g) - n * mean(g * n)).
    """
    grad, x = p.argument("grad_out"), p.argument("input")
    mean, invstd = _along_channels(p, "save_mean", x), _along_channels(p, "save_invstd", x)
    centred = p.pointwise("centred", "aten.sub.Tensor", x, mean)
    normed = p.pointwise("normed", "aten.mul.Tensor", centred, invstd)
    of_bias = p.reduce("sum", "aten.sum.dim_IntList", grad, P)
    product = p.pointwise("product", "aten.mul.Tensor", grad, normed)
    of_weight = p.reduce("product_sum", "aten.sum.dim_IntList", product, P)
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


_EXPANDS, _ALLOCATES = Expands("input", batch, expand_forward), (Trait.ALLOCATES,)

OPS: Mapping[str, OpInfo] = {
    "aten._native_batch_norm_legit_functional.default": OpInfo(
        forward, traits=_ALLOCATES, expands=_EXPANDS
    ),
    "aten._native_batch_norm_legit.no_stats": OpInfo(forward, expands=_EXPANDS),
    "aten._native_batch_norm_legit_no_training.default": OpInfo(given_statistics),
    "aten.native_batch_norm_backward.default": OpInfo(
        backward, traits=_ALLOCATES, expands=Expands("input", batch, expand_backward)
    ),
}
