"""Signatures of convolution and pooling.  Tensors are (samples, channels, height, width) or with
other numbers of dims.

A convolution is a matrix product in samples, input channels and output channels.  Not height and
width: a kernel reaches over the edge of a part.  Not channels of a grouped convolution: a part of
the groups is another op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpCost, OpInfo, ProductKind, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import (
    LocalCall,
    LocalView,
    OpView,
    Signature,
    bind,
    partial_rows,
    places,
    rebind,
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
        return rebind(view.op)
    return rebind(view.op, bias_sizes=(view.in_slices[0][1][1],))


def pooling(view: OpView) -> tuple[Signature, ...]:
    """Samples and channels are independent.  An average and a gradient are linear, a maximum is
    not.
    """
    op, ndim = view.op, len(view.in_shapes[0])
    rows = [row(op, dict.fromkeys(places(op), S(d)), S(d)) for d in range(ndim - 2)]
    if "grad_output" in places(op):
        return (*rows, *partial_rows(op, ("grad_output",)))
    return (*rows, *partial_rows(op, ("self" if "avg" in op.target else "",)))


def _flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    each = in_shapes[0] if bind(op)["transposed"] else out_shapes[0] or ()
    return 2.0 * math.prod(each) * math.prod(in_shapes[1][1:])


def _backward_flops(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]
) -> float:
    """Count the gradients of input and weight, if wanted."""
    wanted = sum(shape is not None for shape in out_shapes[:2])
    each = in_shapes[1 if bind(op)["transposed"] else 0]
    return 2.0 * wanted * math.prod(each) * math.prod(in_shapes[2][1:])


_POOLING = OpInfo(pooling)

OPS: Mapping[str, OpInfo] = {
    "aten.convolution.default": OpInfo(
        convolution,
        traits=(Trait.PRODUCT, Trait.ALLOCATES),
        cost=OpCost(product=ProductKind.CONVOLUTION, flops=_flops),
    ),
    "aten.convolution_backward.default": OpInfo(
        convolution_backward,
        local=local_convolution_backward,
        traits=(Trait.ALLOCATES,),
        cost=OpCost(product=ProductKind.CONVOLUTION, flops=_backward_flops),
    ),
    "aten.max_pool2d_with_indices.default": _POOLING,
    "aten.avg_pool2d.default": _POOLING,
    "aten._adaptive_avg_pool2d.default": _POOLING,
    "aten.max_pool2d_with_indices_backward.default": _POOLING,
    "aten.avg_pool2d_backward.default": _POOLING,
    "aten._adaptive_avg_pool2d_backward.default": _POOLING,
}
