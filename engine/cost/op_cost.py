"""Seconds of one op on one rank: the larger of its arithmetic and its memory traffic, times what
ops that were measured say of it.

Arithmetic counts 2 for a multiply-add, at the speed of the first output's dtype; traffic is every
input and output once, in bytes.  Shapes are what the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from flowrun.engine.hardware.hardware import CPU, Hardware
from flowrun.engine.hardware.measured_ops import Factors, Shapes, factor
from flowrun.engine.ir.graph import BACKWARD, WEIGHT_GRAD, LogicalTensor, Op
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.signature import bind, places
from flowrun.engine.ops.traits import is_view

_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.matmul.default")
_BATCHED = ("aten.bmm.default", "aten.baddbmm.default", "aten.matmul.default")
# Bytes of what the engine's own ops make on the way, for each element of the first output: a hash
# is some 15 torch ops over 32-bit words (ops/random.py).  A GPU has one kernel for them.
_BETWEEN = {"flow.dropout_mask": 120.0, "flow.normal": 300.0}


# What is computed for each element of an input: of what is reduced, of the rows of a table.
COUNTED = {"aten.logsumexp.default": 0, "flow.update_rows": 2}


# Products of experts, and the gradients of input and weights.
GROUPED = tuple(f"transformers.grouped_mm_fallback{way}.default" for way in ("", "_backward"))


def op_flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Multiply-adds times 2 of matrix products, attention and convolutions; else 0.

    Of experts each is thought to have as many tokens.
    """
    name = op.target.split(".")[1] if op.target.startswith("aten.") else ""
    if op.table is not None and (given := op.table.flops(in_shapes, out_shapes)) is not None:
        return given
    match name:
        case "mm" | "bmm" | "matmul":
            return 2.0 * math.prod(in_shapes[0]) * in_shapes[1][-1]
        case "addmm" | "baddbmm":
            return 2.0 * math.prod(in_shapes[1]) * in_shapes[2][-1]
        case "convolution":
            each = in_shapes[0] if bind(op)["transposed"] else out_shapes[0] or ()
            return 2.0 * math.prod(each) * math.prod(in_shapes[1][1:])
        case "convolution_backward":  # gradients of input and weight, if wanted
            wanted = sum(shape is not None for shape in out_shapes[:2])
            each = in_shapes[1 if bind(op)["transposed"] else 0]
            return 2.0 * wanted * math.prod(each) * math.prod(in_shapes[2][1:])
    if op.target in GROUPED:
        tokens, (experts, _, wide), (of_all,) = in_shapes[:3]
        wanted = sum(shape is not None for shape in out_shapes)
        return 2.0 * wanted * math.prod(tokens) * wide * experts / of_all
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
    tensors: Mapping[str, LogicalTensor],
    hardware: Hardware,
) -> float:
    """Foreseen seconds of the op on shapes that one rank holds.  tensors: by name, for dtypes."""
    if is_view(op.target):
        return 0.0
    if op.table is not None and (given := op.table.seconds(in_shapes, out_shapes)) is not None:
        return given + hardware.op_s
    sizes = [tensors[name].dtype.itemsize for name in op.inputs]
    read = [n * math.prod(shape) for n, shape in zip(sizes, in_shapes, strict=True)]
    made = [
        tensors[name].dtype.itemsize * math.prod(shape)
        for name, shape in zip(op.outputs, out_shapes, strict=True)
        if name is not None and shape is not None
    ]
    moved = float(sum(read) + sum(made))
    if op.target == "aten.embedding.default":
        moved -= read[0]  # of the table no more than comes out
    elif op.target == "flow.collect":
        moved = 2 * sum(read)  # what it makes is of all micro-batches
    elif op.target == "flow.update_rows":
        moved = 3 * len(op.outputs) * read[2]
    if hardware.device == CPU:
        moved += _BETWEEN.get(op.target, 0.0) * math.prod(out_shapes[0] or ())
    flop = op_flops(op, in_shapes, out_shapes)
    dtype = dtype_name(op, tensors)
    if hardware.device == CPU and "scaled_dot_product" in op.target:
        dtype = "fp32"  # blocks too small for narrower products: no faster in bf16
    done = flop * _whole_tiles(op, out_shapes, hardware.tile)
    products_s = hardware.products(dtype).seconds(done) / _share(op, in_shapes, dtype, hardware)
    if hardware.writes_behind and op.target in _PRODUCTS:
        cube = (flop / 2) ** (2 / 3) * tensors[op.makes[0]].dtype.itemsize  # as many operations
        more = sum(made) - cube
        products_s += max(0.0, more) / hardware.memory_bytes_per_s
    elements_s = element_seconds(op, in_shapes, out_shapes, hardware)
    bias_s = 0.0
    if op.target == "aten.addmm.default" and hardware.bias_apart:
        bias_s = 2 * sum(made) / hardware.memory_bytes_per_s + hardware.op_s
    moved_s = moved / hardware.memory_bytes_per_s
    seconds = max(products_s, elements_s, moved_s) + hardware.op_s + bias_s
    if op.target in hardware.ops:
        assert isinstance(hardware.ops, Factors)
        shapes = measured_shapes(in_shapes, out_shapes)
        seconds *= factor(hardware.ops, op.target, dtype_name(op, tensors), shapes)
    return seconds


def measured_shapes(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> Shapes:
    """What tells an op from another of its target where ops are measured (measured.text_of)."""
    return tuple(shape or (1,) for shape in (*in_shapes, *out_shapes[:1]) if shape is not None)


def dtype_name(op: Op, tensors: Mapping[str, LogicalTensor]) -> str:
    """Of the first output, or of the first input where nothing comes out: "bf16", "fp32" of all
    that is no narrow float.
    """
    return _NARROW.get(tensors[(*op.makes, *op.inputs)[0]].dtype, "fp32")


def element_seconds(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None], hardware: Hardware
) -> float:
    """Of what an op computes for each element, if that takes longer than its bytes.  Elements are
    those of the first output, or of what COUNTED names.
    """
    speed = hardware.elements_per_s.get(op.target)
    shape = in_shapes[COUNTED[op.target]] if op.target in COUNTED else out_shapes[0]
    return math.prod(shape or ()) / speed if speed else 0.0


def _whole_tiles(op: Op, out_shapes: Sequence[Shape | None], tile: int) -> float:
    """What a product computes for each operation that is asked of it."""
    if op.target not in _PRODUCTS:
        return 1.0
    sides = (out_shapes[0] or ())[-2:]
    return math.prod(math.ceil(side / tile) * tile / side for side in sides if side > tile)


def _share(op: Op, in_shapes: Sequence[Shape], dtype: str, hardware: Hardware) -> float:
    """Of the speed of forward's products, what the op's own reach."""
    if "scaled_dot_product" in op.target:
        return hardware.attention_share
    if op.target in _BATCHED and len(in_shapes[0]) > 2:
        return hardware.batched_share
    shares = {BACKWARD: hardware.backward_share, WEIGHT_GRAD: hardware.weight_grad_share}
    share = shares.get(op.phase, 1.0)
    if "convolution" in op.target:
        small = dtype == "fp32" and not hardware.uses_tf32 and _is_3x3(op, in_shapes)
        share *= hardware.convolution_share * (hardware.winograd if small else 1.0)
    return share


def _is_3x3(op: Op, in_shapes: Sequence[Shape]) -> bool:
    """A convolution of 3 x 3 that looks at every place, not at every other."""
    weight, named = in_shapes[places(op).index("weight")], bind(op)
    steps = (*named["stride"], *named["dilation"], named["groups"])
    return weight[2:] == (3, 3) and set(steps) == {1}
