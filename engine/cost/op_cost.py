"""Seconds of one op on one rank: the larger of its arithmetic and its memory traffic.

The shares and factors were measured on one thread of an AMD EPYC, of the GPT that `flowrun bench`
trains, by its trace (engine.trace=true): acts of the regions beside what was foreseen.

Arithmetic counts 2 for a multiply-add, at the speed of the first output's dtype; traffic is every
input and output once, in bytes.  Shapes are what the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from flowrun.engine.cost.hardware import Hardware
from flowrun.engine.graph import BACKWARD, WEIGHT_GRAD, Op, Tensor
from flowrun.engine.ops.traits import is_view
from flowrun.engine.placement import Shape

_OP_S = 4e-6  # of starting one op from Python
_ATTENTION_SHARE = 0.6  # of the speed of large products: exponentials between small ones
_PRODUCT_FLOP = 8e6  # a product takes as long as if it had so many more (at most 0.3 of its own):
# small ones find their matrices in no near cache
_BACKWARD_SHARE = 0.97  # of the speed of large products; mean of two, where both are in one region
_WEIGHT_GRAD_SHARE = 0.9  # a weight's gradient reads a matrix across its rows
# How many times slower than streaming: arithmetic, where it counts.
_SLOWER = {
    "aten._log_softmax.default": 2.6,
    "aten._log_softmax_backward_data.default": 1.7,
    "aten._softmax.default": 2.6,
    "aten._softmax_backward_data.default": 1.7,
    "aten.gelu.default": 1.6,
    "aten.gelu_backward.default": 1.6,
}


def op_flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Multiply-adds times 2 of matrix products, attention and convolutions; else 0."""
    name = op.target.split(".")[1] if op.target.startswith("aten.") else ""
    match name:
        case "mm" | "bmm":
            return 2.0 * math.prod(in_shapes[0]) * in_shapes[1][-1]
        case "addmm" | "baddbmm":
            return 2.0 * math.prod(in_shapes[1]) * in_shapes[2][-1]
        case "convolution":
            return 2.0 * math.prod(out_shapes[0] or ()) * math.prod(in_shapes[1][1:])
        case "convolution_backward":
            return 4.0 * math.prod(in_shapes[0]) * math.prod(in_shapes[2][1:])
    if "scaled_dot_product" in name:
        backward = name.endswith("backward")
        query = in_shapes[1 if backward else 0]
        keys = in_shapes[2 if backward else 1][-2]
        return (10.0 if backward else 4.0) * math.prod(query) * keys
    return 0.0


def op_seconds(
    op: Op,
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape | None],
    tensors: Mapping[str, Tensor],
    hardware: Hardware,
) -> float:
    """Foreseen seconds of the op on shapes that one rank holds.  tensors: by name, for dtypes."""
    if is_view(op.target):
        return 0.0
    sizes = [tensors[name].dtype.itemsize for name in op.inputs]
    read = [n * math.prod(shape) for n, shape in zip(sizes, in_shapes, strict=True)]
    made = [
        tensors[name].dtype.itemsize * math.prod(shape)
        for name, shape in zip(op.outputs, out_shapes, strict=True)
        if name is not None and shape is not None
    ]
    moved = float(sum(read) + sum(made))
    moved *= _SLOWER.get(op.target, 1.0)
    if op.target == "aten.embedding.default":
        moved -= read[0]  # of the table no more than comes out
    elif op.target == "flow.update_rows":
        moved = 3 * len(op.outputs) * read[2]
    flops = op_flops(op, in_shapes, out_shapes)
    speed = _speed(hardware, tensors[op.makes[0]].dtype) * _reached(op)
    arithmetic_s = (flops + min(_PRODUCT_FLOP, 0.3 * flops)) / speed if flops else 0.0
    return max(arithmetic_s, moved / hardware.memory_bytes_per_s) + _OP_S


def _reached(op: Op) -> float:
    """Share of the speed of large matrix products that the op's own reach."""
    if "scaled_dot_product" in op.target:
        return _ATTENTION_SHARE
    return {BACKWARD: _BACKWARD_SHARE, WEIGHT_GRAD: _WEIGHT_GRAD_SHARE}.get(op.phase, 1.0)


def _speed(hardware: Hardware, dtype: torch.dtype) -> float:
    """Of products, in operations per second."""
    narrow = {torch.bfloat16: hardware.bf16_flops, torch.float16: hardware.fp16_flops}
    return narrow.get(dtype) or hardware.flops
