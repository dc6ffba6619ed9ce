"""Seconds of one op on one rank are the larger of its arithmetic and its memory traffic.

Arithmetic counts 2 for a multiply-add that is computed, at the speed of the first output's dtype;
causal attention computes about half of its pairs, as FlashAttention counts.  Traffic is every
input and output once, in bytes, unless the op's OpCost says otherwise.  Ops that were measured
correct both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from flowrun.engine.hardware.hardware import CPU, Hardware
from flowrun.engine.hardware.measured_ops import Factors, Shapes, factor
from flowrun.engine.ir.graph import BACKWARD, WEIGHT_GRAD, LogicalTensor, Op, Ref
from flowrun.engine.ir.op_info import OpCost, ProductKind
from flowrun.engine.ir.placement import Shape, largest_shape
from flowrun.engine.ir.signature import bind, places
from flowrun.engine.ops.registry import arguments_of, info, info_of
from flowrun.engine.ops.traits import is_view

Tensors = Mapping[str, LogicalTensor]

_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MATRICES = (ProductKind.MATRIX, ProductKind.BATCHED)
_CPU_KEYS = 512  # of a block that attention computes on a CPU (kvSplitSize in torch)


class SizedOp(NamedTuple):
    """An op with the shapes of its inputs and outputs (None where unused) on one rank.

    tensors: by name, for dtypes.
    """

    op: Op
    ins: Sequence[Shape]
    outs: Sequence[Shape | None]
    tensors: Tensors

    @staticmethod
    def whole(op: Op, tensors: Tensors) -> SizedOp:
        """Return the op on logical shapes."""
        outs = [None if name is None else tensors[name].shape for name in op.outputs]
        return SizedOp(op, [tensors[name].shape for name in op.inputs], outs, tensors)

    @staticmethod
    def local(op: Op, tensors: Tensors, grid: tuple[int, ...]) -> SizedOp:
        """Return an op that has a signature on the rank with the largest shards.

        grid: sizes of the axes of its stage.
        """
        ins = [
            largest_shape(tensors[n].shape, nd, grid)
            for n, nd in zip(op.inputs, op.in_sbp, strict=True)
        ]
        outs = [
            None if n is None else largest_shape(tensors[n].shape, nd, grid)
            for n, nd in zip(op.outputs, op.out_sbp, strict=True)
        ]
        return SizedOp(op, ins, outs, tensors)

    @property
    def flops(self) -> float:
        """Multiply-adds times 2 of matrix products, attention (all queries with all keys) and
        convolutions; else 0.
        """
        count = self._cost.flops
        return 0.0 if count is None else count(self.op, self.ins, self.outs)

    @property
    def dtype(self) -> str:
        """The dtype of the first output, or of the first input where nothing comes out: "bf16",
        "fp16"; "fp32" for all others.
        """
        return _NARROW.get(self.tensors[(*self.op.makes, *self.op.inputs)[0]].dtype, "fp32")

    @property
    def measured_shapes(self) -> Shapes:
        """The shapes by which measured ops of one target differ (measured_ops.text_of)."""
        return tuple(shape or (1,) for shape in (*self.ins, *self.outs[:1]) if shape is not None)

    def seconds(self, hardware: Hardware) -> float:
        """Foresee the seconds of the op."""
        op, cost = self.op, self._cost
        if is_view(op.target):
            return 0.0
        if cost.seconds is not None:
            return cost.seconds(self.ins, self.outs) + hardware.op_s
        if cost.parts is not None:
            return sum(
                times * SizedOp(part, ins, outs, self.tensors).seconds(hardware)
                for times, part, ins, outs in cost.parts(op, self.ins)
            )
        read, written = self._num_bytes(op.inputs, self.ins), self._num_bytes(op.outputs, self.outs)
        made = sum(written)
        moved = float(cost.moved_bytes(op, read, written) if cost.moved_bytes else sum(read) + made)
        if hardware.device == CPU:
            moved += cost.scratch_bytes * math.prod(self.outs[0] or ())
        bias_s = 0.0
        if cost.adds_bias and hardware.bias_apart:
            bias_s = 2 * made / hardware.memory_bytes_per_s + hardware.op_s
        seconds = max(
            self._products_seconds(made, hardware),
            self.element_seconds(hardware),
            moved / hardware.memory_bytes_per_s,
        )
        seconds += hardware.op_s + bias_s
        if op.target in hardware.ops:
            assert isinstance(hardware.ops, Factors)
            seconds *= factor(hardware.ops, op.target, self.dtype, self.measured_shapes)
        return seconds

    def element_seconds(self, hardware: Hardware) -> float:
        """Foresee the seconds of what the op computes for each element of the first output, or of
        the input that OpCost.counted_input names; 0 if the profile has no speed of it.
        """
        speed = hardware.elements_per_s.get(self.op.target)
        counted = info(self.op.target).cost.counted_input
        shape = self.outs[0] if counted is None else self.ins[counted]
        return math.prod(shape or ()) / speed if speed else 0.0

    @property
    def _cost(self) -> OpCost:
        return info_of(self.op).cost

    def _num_bytes(self, names: Sequence[str | None], shapes: Sequence[Shape | None]) -> list[int]:
        return [
            self.tensors[name].dtype.itemsize * math.prod(shape)
            for name, shape in zip(names, shapes, strict=True)
            if name is not None and shape is not None
        ]

    def _products_seconds(self, made_bytes: int, hardware: Hardware) -> float:
        product, flop = self._cost.product, self.flops
        dtype = "fp8" if self.op.target == "aten._scaled_mm.default" else self.dtype
        if hardware.device == CPU and product == ProductKind.ATTENTION:
            dtype = "fp32"  # blocks too small for narrower products: no faster in bf16
        computed = flop * self._count_computed(hardware)
        if product == ProductKind.ATTENTION and hardware.attention:
            return computed / (hardware.products(dtype).flops * self._attention_share(hardware))
        seconds = hardware.products(dtype).seconds(computed) / self._share(dtype, hardware)
        if hardware.writes_behind and product in _MATRICES:
            itemsize = self.tensors[self.op.makes[0]].dtype.itemsize
            cube = (flop / 2) ** (2 / 3) * itemsize  # as many operations
            seconds += max(0.0, made_bytes - cube) / hardware.memory_bytes_per_s
        return seconds

    def _count_computed(self, hardware: Hardware) -> float:
        """Return operations done per operation that is asked for: tiles are computed whole, and
        keys that a causal mask hides are not.
        """
        cost, tile = self._cost, hardware.tile
        if cost.seen is not None:
            return cost.seen(self.op, self.ins, _CPU_KEYS if hardware.device == CPU else 1)
        if cost.product not in _MATRICES:
            return 1.0
        sides = (self.outs[0] or ())[-2:]
        return math.prod(math.ceil(side / tile) * tile / side for side in sides if side > tile)

    def _attention_share(self, hardware: Hardware) -> float:
        """Return the share of the peak of products that attention reaches by the profile's table;
        a mask other than the causal one needs another kernel.
        """
        given = arguments_of(self.op).items()
        names = [name for name, value in given if isinstance(value, Ref)]
        at = dict(zip(names, self.ins, strict=True))
        keys = at["key"][-2] * self._count_computed(hardware)
        share = hardware.attention_speed(at["query"][-1], keys, "backward" in self.op.target)
        masked = hardware.masked_share if "attn_mask" in names else 1.0
        return share * masked * hardware.attention_share

    def _share(self, dtype: str, hardware: Hardware) -> float:
        """Return the share of the speed of forward's products that the op's own reach."""
        kind = info(self.op.target).cost.product
        if kind == ProductKind.ATTENTION:
            return hardware.attention_share
        if kind == ProductKind.BATCHED and len(self.ins[0]) > 2:
            return hardware.batched_share
        shares = {BACKWARD: hardware.backward_share, WEIGHT_GRAD: hardware.weight_grad_share}
        share = shares.get(self.op.phase, 1.0)
        if kind == ProductKind.CONVOLUTION:
            small = dtype == "fp32" and not hardware.uses_tf32 and self._is_3x3()
            share *= hardware.convolution_share * (hardware.winograd if small else 1.0)
        return share

    def _is_3x3(self) -> bool:
        """A convolution of 3 x 3 that looks at every place, not at every other."""
        weight, named = self.ins[places(self.op).index("weight")], bind(self.op)
        steps = (*named["stride"], *named["dilation"], named["groups"])
        return weight[2:] == (3, 3) and set(steps) == {1}
