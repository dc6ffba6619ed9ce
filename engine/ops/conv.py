"""Signatures of convolution and pooling.  Tensors are (samples, channels, height, width) or with
other numbers of dims.

A convolution is a matrix product in samples, input channels and output channels.  Not height and
width: a kernel reaches over the edge of a part.  Not channels of a grouped convolution: a part of
the groups is another op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ops.signature import (
    Local,
    LocalCall,
    LocalView,
    OpView,
    Rule,
    Signature,
    bind,
    partial_rows,
    places,
    rebound,
    row,
)


def _channel_dims(given: Mapping[str, Any]) -> tuple[int, int]:
    """Dims of the weight that are (output channels, input channels)."""
    return (1, 0) if given["transposed"] else (0, 1)


def convolution(view: OpView) -> tuple[Signature, ...]:
    """The bias joins every sum of parts once, so it is P wherever the output is."""
    op, given = view.op, bind(view.op)
    out_dim, in_dim = _channel_dims(given)
    rows = [
        row(op, {"input": S(0)}, S(0)),
        row(op, {"input": P, "bias": P}, P),
        row(op, {"weight": P, "bias": P}, P),
    ]
    if given["groups"] == 1:
        rows.append(row(op, {"weight": S(out_dim), "bias": S(0)}, S(1)))
        rows.append(row(op, {"input": S(1), "weight": S(in_dim), "bias": P}, P))
    return tuple(rows)


def convolution_backward(view: OpView) -> tuple[Signature, ...]:
    """(grad_output, input, weight) -> gradients of (input, weight, bias).

    The first is a product of grad_output and weight, the second of grad_output and input, the third
    a sum of grad_output.
    """
    op, given = view.op, bind(view.op)
    out_dim, in_dim = _channel_dims(given)
    rows = [
        row(op, {"grad_output": S(0), "input": S(0)}, S(0), P, P),
        row(op, {"grad_output": P}, P),
        row(op, {"input": P}, B, P, B),
        row(op, {"weight": P}, P, B, B),
    ]
    if given["groups"] == 1:
        rows.append(row(op, {"grad_output": S(1), "weight": S(out_dim)}, P, S(out_dim), S(0)))
        rows.append(row(op, {"input": S(1), "weight": S(in_dim)}, S(1), S(in_dim), B))
    return tuple(rows)


def local_convolution_backward(view: LocalView) -> LocalCall:
    """bias_sizes is the local number of output channels."""
    given = bind(view.op)
    if given["bias_sizes"] is None:
        return rebound(view.op)
    return rebound(view.op, bias_sizes=(view.in_slices[0][1][1],))


def pooling(view: OpView) -> tuple[Signature, ...]:
    """Samples and channels are independent.  An average is linear, a maximum is not."""
    op, ndim = view.op, len(view.in_shapes[0])
    rows = [row(op, dict.fromkeys(places(op), S(d)), S(d)) for d in range(ndim - 2)]
    linear = "self" if "avg" in op.target else ""
    return (*rows, *partial_rows(op, (linear,)))


def pooling_backward(view: OpView) -> tuple[Signature, ...]:
    """Samples and channels are independent; linear in the gradient."""
    op, ndim = view.op, len(view.in_shapes[0])
    rows = [row(op, dict.fromkeys(places(op), S(d)), S(d)) for d in range(ndim - 2)]
    return (*rows, *partial_rows(op, ("grad_output",)))


RULES: Mapping[str, Rule] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten.max_pool2d_with_indices.default": pooling,
    "aten.avg_pool2d.default": pooling,
    "aten._adaptive_avg_pool2d.default": pooling,
    "aten.max_pool2d_with_indices_backward.default": pooling_backward,
    "aten.avg_pool2d_backward.default": pooling_backward,
    "aten._adaptive_avg_pool2d_backward.default": pooling_backward,
}

LOCALS: Mapping[str, Local] = {
    "aten.convolution_backward.default": local_convolution_backward,
}
