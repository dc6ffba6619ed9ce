"""Seconds of one op on one rank are the larger of its arithmetic and its memory traffic.

Arithmetic counts 2 for a multiply-add, at the speed of the first output's dtype; traffic is every
input and output once, in bytes, unless the op's OpCost says otherwise.  Shapes are what the rank
holds.  Ops that were measured correct both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from flowrun.engine.hardware.hardware import CPU, Hardware
from flowrun.engine.hardware.measured_ops import Factors, Shapes, factor
from flowrun.engine.ir.graph import BACKWARD, WEIGHT_GRAD, LogicalTensor, Op
from flowrun.engine.ir.op_info import ProductKind
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.signature import bind, places
from flowrun.engine.ops.registry import info, info_of
from flowrun.engine.ops.traits import is_view

_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MATRICES = (ProductKind.MATRIX, ProductKind.BATCHED)


def op_flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Multiply-adds times 2 of matrix products, attention and convolutions; else 0.

    in_shapes, out_shapes: of op.inputs and op.outputs (None where unused).
    """
    flops = info_of(op).cost.flops
    return 0.0 if flops is None else flops(op, in_shapes, out_shapes)


def op_seconds(
    op: Op,
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape | None],
    tensors: Mapping[str, LogicalTensor],
    hardware: Hardware,
) -> float:
    """Foresee the seconds of an op on one rank.

    in_shapes, out_shapes: what the rank holds of op.inputs and op.outputs (None where unused).
    tensors: by name, for dtypes.
    hardware: the profile.
    """
    if is_view(op.target):
        return 0.0
    cost = info_of(op).cost
    if cost.seconds is not None:
        return cost.seconds(in_shapes, out_shapes) + hardware.op_s
    read = _num_bytes(op.inputs, in_shapes, tensors)
    written = _num_bytes(op.outputs, out_shapes, tensors)
    moved = float(
        cost.moved_bytes(op, read, written) if cost.moved_bytes else sum(read) + sum(written)
    )
    if hardware.device == CPU:
        moved += cost.scratch_bytes * math.prod(out_shapes[0] or ())
    products_s = _products_seconds(op, in_shapes, out_shapes, tensors, sum(written), hardware)
    elements_s = element_seconds(op, in_shapes, out_shapes, hardware)
    bias_s = 0.0
    if cost.adds_bias and hardware.bias_apart:
        bias_s = 2 * sum(written) / hardware.memory_bytes_per_s + hardware.op_s
    moved_s = moved / hardware.memory_bytes_per_s
    seconds = max(products_s, elements_s, moved_s) + hardware.op_s + bias_s
    if op.target in hardware.ops:
        assert isinstance(hardware.ops, Factors)
        shapes = measured_shapes(in_shapes, out_shapes)
        seconds *= factor(hardware.ops, op.target, dtype_name(op, tensors), shapes)
    return seconds


def _num_bytes(
    names: Sequence[str | None],
    shapes: Sequence[Shape | None],
    tensors: Mapping[str, LogicalTensor],
) -> list[int]:
    """Return the bytes of each tensor that is there, of the shape that the rank holds."""
    return [
        tensors[name].dtype.itemsize * math.prod(shape)
        for name, shape in zip(names, shapes, strict=True)
        if name is not None and shape is not None
    ]


def _products_seconds(
    op: Op,
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape | None],
    tensors: Mapping[str, LogicalTensor],
    made_bytes: int,
    hardware: Hardware,
) -> float:
    """Foresee the seconds of an op's multiply-adds; parameters as of op_seconds."""
    product, dtype = info_of(op).cost.product, dtype_name(op, tensors)
    if hardware.device == CPU and product == ProductKind.ATTENTION:
        dtype = "fp32"  # blocks too small for narrower products: no faster in bf16
    flop = op_flops(op, in_shapes, out_shapes)
    whole = flop * _whole_tiles(op, out_shapes, hardware.tile)
    seconds = hardware.products(dtype).seconds(whole) / _share(op, in_shapes, dtype, hardware)
    if hardware.writes_behind and product in _MATRICES:
        cube = (flop / 2) ** (2 / 3) * tensors[op.makes[0]].dtype.itemsize  # as many operations
        seconds += max(0.0, made_bytes - cube) / hardware.memory_bytes_per_s
    return seconds


def measured_shapes(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> Shapes:
    """Return the shapes by which measured ops of one target differ (measured_ops.text_of)."""
    return tuple(shape or (1,) for shape in (*in_shapes, *out_shapes[:1]) if shape is not None)


def dtype_name(op: Op, tensors: Mapping[str, LogicalTensor]) -> str:
    """Return the dtype of the first output, or of the first input where nothing comes out: "bf16",
    "fp16"; "fp32" for all others.
    """
    return _NARROW.get(tensors[(*op.makes, *op.inputs)[0]].dtype, "fp32")


def element_seconds(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None], hardware: Hardware
) -> float:
    """Foresee the seconds of what an op computes for each element; 0 if the profile has no speed of
    it.

    in_shapes, out_shapes: what one rank holds.  Elements are those of the first output, or of the
    input that OpCost.counted_input names.
    hardware: the profile.
    """
    speed = hardware.elements_per_s.get(op.target)
    counted = info(op.target).cost.counted_input
    shape = out_shapes[0] if counted is None else in_shapes[counted]
    return math.prod(shape or ()) / speed if speed else 0.0


def _whole_tiles(op: Op, out_shapes: Sequence[Shape | None], tile: int) -> float:
    """Return operations done per operation that is asked for: tiles are computed whole."""
    if info(op.target).cost.product not in _MATRICES:
        return 1.0
    sides = (out_shapes[0] or ())[-2:]
    return math.prod(math.ceil(side / tile) * tile / side for side in sides if side > tile)


def _share(op: Op, in_shapes: Sequence[Shape], dtype: str, hardware: Hardware) -> float:
    """Return the share of the speed of forward's products that the op's own reach."""
    kind = info(op.target).cost.product
    if kind == ProductKind.ATTENTION:
        return hardware.attention_share
    if kind == ProductKind.BATCHED and len(in_shapes[0]) > 2:
        return hardware.batched_share
    shares = {BACKWARD: hardware.backward_share, WEIGHT_GRAD: hardware.weight_grad_share}
    share = shares.get(op.phase, 1.0)
    if kind == ProductKind.CONVOLUTION:
        small = dtype == "fp32" and not hardware.uses_tf32 and _is_3x3(op, in_shapes)
        share *= hardware.convolution_share * (hardware.winograd if small else 1.0)
    return share


def _is_3x3(op: Op, in_shapes: Sequence[Shape]) -> bool:
    """A convolution of 3 x 3 that looks at every place, not at every other."""
    weight, named = in_shapes[places(op).index("weight")], bind(op)
    steps = (*named["stride"], *named["dilation"], named["groups"])
    return weight[2:] == (3, 3) and set(steps) == {1}
