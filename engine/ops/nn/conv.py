"""Signatures of convolution and pooling.  Tensors are (samples, channels, height, width) or with
other numbers of dims.

A convolution is a matrix product in samples, input channels and output channels.  Not height and
width: a kernel reaches over the edge of a part.  Not channels of a grouped convolution: a part of
the groups is another op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpCost, OpInfo, ProductKind, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import LocalCall, LocalView, OpRows, OpView, bind, places


def _channel_dims(given: Mapping[str, object]) -> tuple[int, int]:
    """Dims of the weight that are (output channels, input channels)."""
    return (1, 0) if given["transposed"] else (0, 1)


def convolution(view: OpView) -> OpRows:
    """The bias joins every sum of parts once, so it is P wherever the output is."""
    given = view.given
    out_dim, in_dim = _channel_dims(given)
    rows = [
        view.row({"input": S(0)}, S(0)),
        view.row({"input": P, "bias": P}, P),
        view.row({"weight": P, "bias": P}, P),
    ]
    if given["groups"] == 1:
        rows.append(view.row({"weight": S(out_dim), "bias": S(0)}, S(1)))
        rows.append(view.row({"input": S(1), "weight": S(in_dim), "bias": P}, P))
    return tuple(rows)


def convolution_backward(view: OpView) -> OpRows:
    """(grad_output, input, weight) -> gradients of (input, weight, bias).

    The first is a product of grad_output and weight, the second of grad_output and input, the third
    a sum of grad_output.
    """
    given = view.given
    out_dim, in_dim = _channel_dims(given)
    rows = [
        view.row({"grad_output": S(0), "input": S(0)}, S(0), P, P),
        view.row({"grad_output": P}, P),
        view.row({"input": P}, B, P, B),
        view.row({"weight": P}, P, B, B),
    ]
    if given["groups"] == 1:
        rows.append(view.row({"grad_output": S(1), "weight": S(out_dim)}, P, S(out_dim), S(0)))
        rows.append(view.row({"input": S(1), "weight": S(in_dim)}, S(1), S(in_dim), B))
    return tuple(rows)


def local_convolution_backward(view: LocalView) -> LocalCall:
    """bias_sizes is the local number of output channels."""
    biased = view.given["bias_sizes"] is not None
    return view.rebind(bias_sizes=(view.in_slices[0][1][1],)) if biased else view.rebind()


def pooling(view: OpView) -> OpRows:
    """Samples and channels are independent.  Averages and gradients are linear, no maximum is."""
    names, ndim = places(view.op), len(view.in_shapes[0])
    rows = [view.row(dict.fromkeys(names, S(d)), S(d)) for d in range(ndim - 2)]
    linear = "grad_output" if "grad_output" in names else "self" if "avg" in view.op.target else ""
    return (*rows, *view.partial((linear,)))


def _flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    each = in_shapes[0] if bind(op)["transposed"] else out_shapes[0] or ()
    return 2.0 * math.prod(each) * math.prod(in_shapes[1][1:])


def _flops_back(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Count the gradients of input and weight, if wanted."""
    wanted = sum(shape is not None for shape in out_shapes[:2])
    each = in_shapes[1 if bind(op)["transposed"] else 0]
    return 2.0 * wanted * math.prod(each) * math.prod(in_shapes[2][1:])


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
        cost=OpCost(product=ProductKind.CONVOLUTION, flops=_flops_back),
    ),
    **{
        f"aten.{name}{backward}.default": OpInfo(pooling)
        for name in ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")
        for backward in ("", "_backward")
    },
}
