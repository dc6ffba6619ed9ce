"""Signatures of ops that work element by element, with broadcasting.

A split of an output dim splits every operand that has the dim, and leaves B an operand that is
broadcast along it. P passes where the op is linear: in one operand (mul: "P,B -> P"), or in several
at once (add: "P,P -> P"). Not "P,B -> P" for add: every rank would add the B operand once.  Not "P
-> P" for relu: relu(a + b) != relu(a) + relu(b).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.signature import (
    Labels,
    OpView,
    Rule,
    Signature,
    bind,
    labelled,
    partial_rows,
)

Groups = Sequence[Sequence[str]]


def broadcast_labels(shape: Shape, out: Shape) -> Labels:
    """Labels of an operand's dims: the output dim that each is, None where it is broadcast."""
    shift = len(out) - len(shape)
    return tuple(
        None if size == 1 and out[shift + d] != 1 else shift + d for d, size in enumerate(shape)
    )


def elementwise(*groups: Sequence[str]) -> Rule:
    """Rule of an elementwise op that is jointly linear in each group of arguments (by name)."""
    return lambda view: _rows(view, groups)


def elementwise_if(linear: Callable[[OpView], bool], *groups: Sequence[str]) -> Rule:
    """As `elementwise`, but linear only where `linear(view)` says so."""
    return lambda view: _rows(view, groups if linear(view) else ())


def _rows(view: OpView, groups: Groups) -> tuple[Signature, ...]:
    out = view.out_shapes[0]
    if out is None:
        out = tuple(torch.broadcast_shapes(*view.in_shapes))
    ins = [broadcast_labels(shape, out) for shape in view.in_shapes]
    return (*labelled(ins, [tuple(range(len(out)))]), *partial_rows(view.op, *groups))


def prelu_backward(view: OpView) -> tuple[Signature, ...]:
    """(grad_output, self, weight) -> gradients of self and weight, both of the full shape."""
    ins = [broadcast_labels(shape, view.in_shapes[0]) for shape in view.in_shapes]
    full = tuple(range(len(view.in_shapes[0])))
    return (*labelled(ins, [full, full]), *partial_rows(view.op, ("grad_output",)))


def stays_float(view: OpView) -> bool:
    """Not a cast to an integer: it rounds each part, and the rounded parts sum to another."""
    dtype = bind(view.op).get("dtype")
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _fills_zero(view: OpView) -> bool:
    return bool(bind(view.op)["value"] == 0)


def _no_rounding(view: OpView) -> bool:
    return bind(view.op)["rounding_mode"] is None


NONLINEAR = elementwise()
LINEAR = elementwise(("self",))
LINEAR_IN_GRAD = elementwise(("grad_output",))
SUM = elementwise(("self", "other"))
PRODUCT = elementwise(("self",), ("other",))

_NONLINEAR_NAMES = """
    abs.default acos.default acosh.default asin.default asinh.default atan.default atan2.default
    atanh.default bitwise_and.Tensor bitwise_and.Scalar bitwise_not.default bitwise_or.Tensor
    bitwise_or.Scalar bitwise_xor.Tensor ceil.default clamp.default clamp.Tensor clamp_max.default
    clamp_min.default cos.default cosh.default elu.default eq.Scalar eq.Tensor erf.default
    erfc.default exp.default exp2.default expm1.default floor.default floor_divide.default
    fmax.default fmin.default fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor gelu.default gt.Scalar
    gt.Tensor hardsigmoid.default hardswish.default hardtanh.default isfinite.default isinf.default
    isnan.default le.Scalar le.Tensor leaky_relu.default log.default log10.default log1p.default
    log2.default logaddexp.default logical_and.default logical_not.default logical_or.default
    logical_xor.default lt.Scalar lt.Tensor maximum.default minimum.default mish.default
    nan_to_num.default ne.Scalar ne.Tensor pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal.default relu.default remainder.Scalar remainder.Tensor round.default rsqrt.default
    sigmoid.default sign.default silu.default sin.default sinh.default softplus.default sqrt.default
    tan.default tanh.default trunc.default add.Scalar sub.Scalar rsub.Scalar
"""

_LINEAR_IN_GRAD_NAMES = """
    elu_backward.default gelu_backward.default hardsigmoid_backward.default
    hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default
    mish_backward.default sigmoid_backward.default silu_backward.default softplus_backward.default
    tanh_backward.default threshold_backward.default
"""

RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": NONLINEAR for name in _NONLINEAR_NAMES.split()},
    "aten._prelu_kernel.default": NONLINEAR,
    "aten._prelu_kernel_backward.default": prelu_backward,
    "aten.neg.default": LINEAR,
    "aten.mul.Scalar": LINEAR,
    "aten.div.Scalar": LINEAR,
    "aten.clone.default": LINEAR,
    "aten.detach.default": LINEAR,
    "aten.alias.default": LINEAR,
    "aten.contiguous.default": LINEAR,
    "aten.lift_fresh_copy.default": LINEAR,
    "aten._to_copy.default": elementwise_if(stays_float, ("self",)),
    "aten.add.Tensor": SUM,
    "aten.sub.Tensor": SUM,
    "aten.rsub.Tensor": SUM,
    "aten.mul.Tensor": PRODUCT,
    "aten.div.Tensor": LINEAR,
    "aten.div.Tensor_mode": elementwise_if(_no_rounding, ("self",)),
    "aten.where.self": elementwise(("self", "other")),
    "aten.masked_fill.Scalar": elementwise_if(_fills_zero, ("self",)),
    "aten.masked_fill.Tensor": elementwise(("self", "value")),
    "aten.addcmul.default": elementwise(("self", "tensor1"), ("self", "tensor2")),
    "aten.addcdiv.default": elementwise(("self", "tensor1")),
    "aten.lerp.Scalar": elementwise(("self", "end")),
    "aten.lerp.Tensor": elementwise(("self", "end")),
    **{f"aten.{name}": LINEAR_IN_GRAD for name in _LINEAR_IN_GRAD_NAMES.split()},
}
