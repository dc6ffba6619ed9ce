"""Signatures of ops that work element by element, with broadcasting.

A split of an output dim splits every operand that has the dim, and leaves B an operand that is
broadcast along it. P passes where the op is linear: in one operand (mul: "P,B -> P"), or in several
at once (add: "P,P -> P"). Not "P,B -> P" for add: every rank would add the B operand once.  Not "P
-> P" for relu: relu(a + b) != relu(a) + relu(b).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flowrun.engine.ir.op_info import OpInfo, OutVariant, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.signature import (
    Labels,
    OpView,
    Rule,
    Signature,
    bind,
    labelled_rows,
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
    """Make the rule of an elementwise op that is jointly linear in each group of arguments (by
    name).
    """
    return lambda view: _rows(view, groups)


def elementwise_if(linear: Callable[[OpView], bool], *groups: Sequence[str]) -> Rule:
    """Make the rule of an elementwise op that is linear in `groups` only where `linear(view)` says
    so.
    """
    return lambda view: _rows(view, groups if linear(view) else ())


def _rows(view: OpView, groups: Groups) -> tuple[Signature, ...]:
    out = view.out_shapes[0]
    if out is None:
        out = tuple(torch.broadcast_shapes(*view.in_shapes))
    ins = [broadcast_labels(shape, out) for shape in view.in_shapes]
    return (*labelled_rows(ins, [tuple(range(len(out)))]), *partial_rows(view.op, *groups))


def prelu_backward(view: OpView) -> tuple[Signature, ...]:
    """(grad_output, self, weight) -> gradients of self and weight, both of the full shape."""
    ins = [broadcast_labels(shape, view.in_shapes[0]) for shape in view.in_shapes]
    full = tuple(range(len(view.in_shapes[0])))
    return (*labelled_rows(ins, [full, full]), *partial_rows(view.op, ("grad_output",)))


def stays_float(view: OpView) -> bool:
    """Return False for a cast to an integer: it rounds each part, and the rounded parts sum to
    another.
    """
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
    erfc.default exp2.default expm1.default floor.default floor_divide.default
    fmax.default fmin.default fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor gt.Scalar
    gt.Tensor hardsigmoid.default hardswish.default hardtanh.default isfinite.default isinf.default
    isnan.default le.Scalar le.Tensor leaky_relu.default log10.default log1p.default
    log2.default logaddexp.default logical_and.default logical_not.default logical_or.default
    logical_xor.default lt.Scalar lt.Tensor maximum.default minimum.default mish.default
    nan_to_num.default ne.Scalar ne.Tensor pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal.default remainder.Scalar remainder.Tensor round.default rsqrt.default
    sigmoid.default sign.default silu.default sin.default sinh.default softplus.default sqrt.default
    sgn.default tan.default tanh.default trunc.default add.Scalar sub.Scalar rsub.Scalar
"""

_LINEAR_IN_GRAD_NAMES = """
    elu_backward.default hardsigmoid_backward.default
    hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default
    mish_backward.default sigmoid_backward.default silu_backward.default softplus_backward.default
    tanh_backward.default
"""

aten = torch.ops.aten


def _info(rule: Rule, *traits: Trait, **known: Any) -> OpInfo:
    return OpInfo(rule, traits=(Trait.POINTWISE, *traits), **known)


def _over(rule: Rule, overload: Callable[..., Any], name: str = "out", *args: int) -> OpInfo:
    """An op that may write over its first argument, or over `args`."""
    return _info(rule, Trait.ALLOCATES, out=OutVariant(overload, name, args or (0,)))


def _relu_over(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return aten.clamp_min.out(x, 0, out=out)  # type: ignore[no-any-return]


CAST = "aten._to_copy.default"

OPS: Mapping[str, OpInfo] = {
    **{f"aten.{name}": _info(NONLINEAR) for name in _NONLINEAR_NAMES.split()},
    "aten.exp.default": _over(NONLINEAR, aten.exp.out),
    "aten.relu.default": _over(NONLINEAR, _relu_over),
    "aten.log.default": _info(NONLINEAR, Trait.ALLOCATES),
    "aten.gelu.default": _info(NONLINEAR, Trait.ALLOCATES),
    "aten._prelu_kernel.default": _info(NONLINEAR),
    "aten._prelu_kernel_backward.default": _info(prelu_backward),
    "aten.neg.default": _info(LINEAR),
    "aten.mul.Scalar": _info(LINEAR),
    "aten.div.Scalar": _info(LINEAR),
    "aten.clone.default": _info(LINEAR),
    "aten.detach.default": _info(LINEAR),
    "aten.alias.default": _info(LINEAR),
    "aten.contiguous.default": _info(LINEAR),
    "aten.lift_fresh_copy.default": _info(LINEAR),
    CAST: _info(elementwise_if(stays_float, ("self",)), Trait.ALLOCATES),
    "aten.add.Tensor": _over(SUM, aten.add.out, "out", 0, 1),
    "aten.sub.Tensor": _over(SUM, aten.sub.out),
    "aten.rsub.Tensor": _info(SUM),
    "aten.mul.Tensor": _over(PRODUCT, aten.mul.out, "out", 0, 1),
    "aten.div.Tensor": _over(LINEAR, aten.div.out),
    "aten.div.Tensor_mode": _info(elementwise_if(_no_rounding, ("self",))),
    "aten.where.self": _info(elementwise(("self", "other"))),
    "aten.masked_fill.Scalar": _info(elementwise_if(_fills_zero, ("self",))),
    "aten.masked_fill.Tensor": _info(elementwise(("self", "value"))),
    "aten.addcmul.default": _info(elementwise(("self", "tensor1"), ("self", "tensor2"))),
    "aten.addcdiv.default": _info(elementwise(("self", "tensor1"))),
    "aten.lerp.Scalar": _info(elementwise(("self", "end"))),
    "aten.lerp.Tensor": _info(elementwise(("self", "end"))),
    **{f"aten.{name}": _info(LINEAR_IN_GRAD) for name in _LINEAR_IN_GRAD_NAMES.split()},
    "aten.threshold_backward.default": _over(
        LINEAR_IN_GRAD, aten.threshold_backward.grad_input, "grad_input"
    ),
    "aten.gelu_backward.default": _over(
        LINEAR_IN_GRAD, aten.gelu_backward.grad_input, "grad_input"
    ),
}
