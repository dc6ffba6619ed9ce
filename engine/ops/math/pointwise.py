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
from flowrun.engine.ir.signature import Function, Labels, OpRows, OpView, Rule, labelled_rows


def broadcast_labels(shape: Shape, out: Shape) -> Labels:
    """Labels of an operand's dims: the output dim that each is, None where it is broadcast."""
    shift = len(out) - len(shape)
    return tuple(
        None if size == 1 and out[shift + d] != 1 else shift + d for d, size in enumerate(shape)
    )


def elementwise(
    *groups: Sequence[str], linear_if: Callable[[OpView], bool] = lambda view: True
) -> Rule:
    """Make the rule of an elementwise op that is jointly linear in each group of arguments (by
    name), where `linear_if` says so of its view.
    """

    def rule(view: OpView) -> OpRows:
        out = view.out_shapes[0]
        if out is None:
            out = tuple(torch.broadcast_shapes(*view.in_shapes))
        ins = [broadcast_labels(shape, out) for shape in view.in_shapes]
        linear = view.partial(*groups) if linear_if(view) else ()
        return (*labelled_rows(ins, [tuple(range(len(out)))]), *linear)

    return rule


def prelu_backward(view: OpView) -> OpRows:
    """(grad_output, self, weight) -> gradients of self and weight, both of the full shape."""
    ins = [broadcast_labels(shape, view.in_shapes[0]) for shape in view.in_shapes]
    full = tuple(range(len(view.in_shapes[0])))
    return (*labelled_rows(ins, [full, full]), *view.partial(("grad_output",)))


def stays_float(view: OpView) -> bool:
    """Return False for a cast to an integer, or to 8 bits, which rounds each part."""
    dtype = view.given.get("dtype")
    return dtype is None or ((dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1)


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
    _prelu_kernel.default
"""

_LINEAR_NAMES = """
    neg.default mul.Scalar div.Scalar clone.default detach.default alias.default contiguous.default
    lift_fresh_copy.default
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


def _over(rule: Rule, overload: Function, name: str = "out", *args: int) -> OpInfo:
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
    "aten._prelu_kernel_backward.default": _info(prelu_backward),
    **{f"aten.{name}": _info(LINEAR) for name in _LINEAR_NAMES.split()},
    CAST: _info(elementwise(("self",), linear_if=stays_float), Trait.ALLOCATES),
    "aten.add.Tensor": _over(SUM, aten.add.out, "out", 0, 1),
    "aten.sub.Tensor": _over(SUM, aten.sub.out),
    "aten.rsub.Tensor": _info(SUM),
    "aten.mul.Tensor": _over(PRODUCT, aten.mul.out, "out", 0, 1),
    "aten.div.Tensor": _over(LINEAR, aten.div.out),
    "aten.div.Tensor_mode": _info(
        elementwise(("self",), linear_if=lambda view: view.given["rounding_mode"] is None)
    ),
    "aten.where.self": _info(elementwise(("self", "other"))),
    "aten.masked_fill.Scalar": _info(
        elementwise(("self",), linear_if=lambda view: bool(view.given["value"] == 0))
    ),
    "aten.masked_fill.Tensor": _info(elementwise(("self", "value"))),
    "aten.addcmul.default": _info(elementwise(("self", "tensor1"), ("self", "tensor2"))),
    "aten.addcdiv.default": _info(elementwise(("self", "tensor1"))),
    **dict.fromkeys(("aten.lerp.Scalar", "aten.lerp.Tensor"), _info(elementwise(("self", "end")))),
    **{f"aten.{name}": _info(LINEAR_IN_GRAD) for name in _LINEAR_IN_GRAD_NAMES.split()},
    "aten.threshold_backward.default": _over(
        LINEAR_IN_GRAD, aten.threshold_backward.grad_input, "grad_input"
    ),
    "aten.gelu_backward.default": _over(
        LINEAR_IN_GRAD, aten.gelu_backward.grad_input, "grad_input"
    ),
}
