"""Program: the ordinary ops that one op becomes, while they are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from flowrun.engine.ir.graph import LogicalTensor, Op, Ref, rename_inputs
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, NdSbp, Sbp, Split
from flowrun.engine.ir.signature import places

ReducedDims = Callable[[Op, Mapping[str, LogicalTensor]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LaidOutValue:
    """A tensor and its nd-SBP, as its readers take it."""

    tensor: LogicalTensor
    nd_sbp: NdSbp


@dataclass(kw_only=True)
class Expansion:
    """The ops written so far.  dims: those that the op reduces.  grid: ranks of each axis."""

    op: Op
    grid: tuple[int, ...]
    tensors: Mapping[str, LogicalTensor]
    dims: tuple[int, ...]
    ops: list[Op] = field(default_factory=list)
    made: list[LogicalTensor] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)  # what was made -> output of the op

    def argument(self, name: str) -> LaidOutValue:
        """A tensor argument, in fp32 if it is narrower: torch takes statistics there too."""
        value = self.given(name)
        if value.tensor.dtype.itemsize >= 4:
            return value
        return self.pointwise(f"{name}_fp32", "aten._to_copy.default", value, dtype=torch.float32)

    def given(self, name: str) -> LaidOutValue:
        """A tensor argument as it is."""
        at = places(self.op).index(name)
        return LaidOutValue(self.tensors[self.op.inputs[at]], self.op.in_sbp[at])

    def has(self, name: str) -> bool:
        """True if the argument is a tensor."""
        return name in places(self.op)

    def reduce(self, suffix: str, target: str, value: LaidOutValue, over: Sbp) -> LaidOutValue:
        """Append a statistic of `value` over `dims`, which stay as 1.

        It is made with `over` on the axes that split them; readers take it whole there.

        suffix: ends the names of the op and of its output.
        target: the reduction, called (tensor, dims, True).
        """
        splits = {Split(d) for d in self.dims}
        output_sbp = tuple(over if sbp in splits else sbp for sbp in value.nd_sbp)
        whole = tuple(B if sbp in splits else sbp for sbp in value.nd_sbp)
        shape = tuple(1 if d in self.dims else n for d, n in enumerate(value.tensor.shape))
        args = (Ref(value.tensor.name), self.dims, True)
        made = self._append(suffix, target, args, (value,), shape, output_sbp)
        return LaidOutValue(made.tensor, whole)

    def pointwise(
        self,
        suffix: str,
        target: str,
        *operands: LaidOutValue | float,
        dtype: torch.dtype | None = None,
    ) -> LaidOutValue:
        """An elementwise op: on each axis the output lies as an operand that is not B, else B."""
        values = tuple(v for v in operands if isinstance(v, LaidOutValue))
        shape = tuple(torch.broadcast_shapes(*(v.tensor.shape for v in values)))
        axes = zip(*(v.nd_sbp for v in values), strict=True)
        nd_sbp = tuple(next((sbp for sbp in axis if sbp != B), B) for axis in axes)
        args = tuple(Ref(v.tensor.name) if isinstance(v, LaidOutValue) else v for v in operands)
        return self._append(suffix, target, args, values, shape, nd_sbp, dtype)

    def view(self, suffix: str, value: LaidOutValue, shape: Shape, nd_sbp: NdSbp) -> LaidOutValue:
        """Append a view of `value` with another `shape` and `nd_sbp`, named by `suffix`."""
        args = (Ref(value.tensor.name), shape)
        return self._append(suffix, "aten.view.default", args, (value,), shape, nd_sbp)

    def output(self, k: int, value: LaidOutValue) -> None:
        """Output k of the op, in its dtype; the value must come from an op of its own."""
        name = self.op.outputs[k]
        if name is None:
            return
        wanted = self.tensors[name].dtype
        if wanted != value.tensor.dtype:
            value = self.pointwise(f"cast{k}", "aten._to_copy.default", value, dtype=wanted)
        assert value.nd_sbp == self.op.out_sbp[k], (self.op, k, value)
        self.outputs[value.tensor.name] = name

    def done(self) -> tuple[tuple[Op, ...], tuple[LogicalTensor, ...]]:
        """(ops, tensors in between); what no output needs is left out."""
        wanted = set(self.outputs)
        kept: list[Op] = []
        for op in reversed(self.ops):
            if wanted.intersection(op.makes):
                wanted.update(op.inputs)
                named = (name if name in wanted else None for name in op.outputs)
                outputs = tuple(self.outputs.get(name or "", name) for name in named)
                kept.append(replace(rename_inputs(op, self.outputs), outputs=outputs))
        between = (t for t in self.made if t.name in wanted and t.name not in self.outputs)
        return tuple(reversed(kept)), tuple(between)

    def count(self, value: LaidOutValue) -> int:
        """Elements that one statistic is over."""
        return math.prod(value.tensor.shape[d] for d in self.dims)

    def _append(
        self,
        suffix: str,
        target: str,
        args: tuple[object, ...],
        reads: tuple[LaidOutValue, ...],
        shape: Shape,
        nd_sbp: NdSbp,
        dtype: torch.dtype | None = None,
    ) -> LaidOutValue:
        kwargs = () if dtype is None else (("dtype", dtype),)
        like = LaidOutValue(LogicalTensor("", shape, dtype or reads[0].tensor.dtype), nd_sbp)
        (made,) = self.call(suffix, target, args, reads, (like,), kwargs)
        return made

    def call(
        self,
        suffix: str,
        target: str,
        args: tuple[object, ...],
        reads: Sequence[LaidOutValue],
        like: Sequence[LaidOutValue],
        kwargs: tuple[tuple[str, object], ...] = (),
    ) -> list[LaidOutValue]:
        """Append an op, called (*args, **kwargs).

        suffix: ends the names of the op and of its outputs.
        reads: the tensors among the arguments, in order.
        like: shape, dtype and nd-SBP of each output.
        """
        name = f"{self.op.name}_{suffix}"
        names = (name, *(f"{name}_{k}" for k in range(1, len(like))))
        made = [
            LaidOutValue(replace(each.tensor, name=n), each.nd_sbp)
            for n, each in zip(names, like, strict=True)
        ]
        self.made += (each.tensor for each in made)
        op = replace(self.op, name=name, target=target, args=args, kwargs=kwargs, outputs=names)
        in_sbp, out_sbp = (tuple(v.nd_sbp for v in side) for side in (reads, made))
        self.ops.append(replace(op, in_sbp=in_sbp, out_sbp=out_sbp))
        return made
