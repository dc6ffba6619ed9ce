"""Signatures of layer, RMS and group normalisation.

Dims in front of the normalised ones are independent of each other and pass their split; the
gradients of weight and bias are sums over them, so P.  Not the normalised dims: norms of the parts
are not the norm of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.sbp import P, S
from flowrun.engine.ir.signature import LocalCall, LocalView, OpRows, OpView

_ROWWISE = ("grad_out", "input", "mean", "rstd")


def _independent_dims(view: OpView) -> range:
    """Dims in front of the normalised ones; the samples of a group norm."""
    given, ndim = view.given, len(view.in_shapes[0])
    normalized = given.get("normalized_shape")
    return range(1) if normalized is None else range(ndim - len(normalized))


def forward(view: OpView) -> OpRows:
    """Output and its statistics follow the input."""
    return tuple(view.row({"input": S(d)}, S(d)) for d in _independent_dims(view))


def backward(view: OpView) -> OpRows:
    """Gradients of input, weight and bias.  All are linear in the output's gradient."""
    op = view.op
    outputs = [
        view.row(dict.fromkeys(_ROWWISE, S(d)), S(d), *(P,) * (len(op.outputs) - 1))
        for d in _independent_dims(view)
    ]
    return (*outputs, view.row({"grad_out": P}, P))


def local_group_norm(view: LocalView) -> LocalCall:
    """The number of samples is an argument."""
    at = 1 if view.op.target.endswith("backward.default") else 0
    return view.rebind(N=view.in_slices[at][0][1])


LAYER_NORM = "aten.native_layer_norm.default"

OPS: Mapping[str, OpInfo] = {
    LAYER_NORM: OpInfo(forward, traits=(Trait.ALLOCATES, Trait.ROW_STATISTICS)),
    "aten.native_layer_norm_backward.default": OpInfo(backward, traits=(Trait.ALLOCATES,)),
    "aten._fused_rms_norm.default": OpInfo(forward),
    "aten._fused_rms_norm_backward.default": OpInfo(backward),
    "aten.native_group_norm.default": OpInfo(forward, local=local_group_norm),
    "aten.native_group_norm_backward.default": OpInfo(backward, local=local_group_norm),
}
