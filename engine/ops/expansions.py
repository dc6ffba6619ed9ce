"""expansions: an op whose signature reduces statistics inside, written out as ordinary ops.

Softmax with its classes split on some axis needs the maximum and the sum of each row over all ranks
of that axis, and nothing else.  The ops carry nd-SBPs of their own; where an output is P and its
reader wants B, insert_boxing puts the boxing. Axes that do not split the classes keep the SBP that
the op's signature gives its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flowrun.engine.graph import Op, Ref, Tensor
from flowrun.engine.ops.signature import bind, places
from flowrun.engine.sbp import P_MAX, B, NdSbp, P, Sbp, Split

_CLASSES_OF = {
    "aten._log_softmax.default": "self",
    "aten._softmax.default": "self",
    "aten._log_softmax_backward_data.default": "output",
    "aten._softmax_backward_data.default": "output",
}


def needs_expansion(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """True if the op splits its classes on some axis.  op.in_sbp holds the chosen signature."""
    if op.target not in _CLASSES_OF or not op.in_sbp:
        return False
    classes = Split(_classes(op, tensors))
    return classes in op.in_sbp[places(op).index(_CLASSES_OF[op.target])]


def expand(op: Op, tensors: Mapping[str, Tensor]) -> tuple[tuple[Op, ...], tuple[Tensor, ...]]:
    """(ops in order, the tensors they make in between).  The last op makes op.outputs."""
    program = _Program(op, tensors)
    _WRITE[op.target](program)
    return tuple(program.ops), tuple(program.made)


def _classes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    ndim = len(tensors[op.inputs[0]].shape)
    return int(bind(op)["dim"]) % ndim


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor and its nd-SBP."""

    tensor: Tensor
    nd_sbp: NdSbp


@dataclass
class _Program:
    """The ops written so far for one softmax."""

    op: Op
    tensors: Mapping[str, Tensor]
    ops: list[Op] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    @property
    def dim(self) -> int:
        """The dim of the classes."""
        return _classes(self.op, self.tensors)

    def argument(self, name: str) -> _Value:
        """A tensor argument of the softmax, in fp32 if it is narrower: statistics are taken there,
        as torch does.
        """
        at = places(self.op).index(name)
        value = _Value(self.tensors[self.op.inputs[at]], self.op.in_sbp[at])
        if value.tensor.dtype.itemsize >= 4:
            return value
        return self.pointwise(f"{name}_fp32", "aten._to_copy.default", value, dtype=torch.float32)

    def reduced(self, suffix: str, target: str, value: _Value, over: Sbp) -> _Value:
        """A statistic of each row, made with `over` on the axes that split the classes; readers
        take it whole there.
        """
        made = tuple(over if sbp == Split(self.dim) else sbp for sbp in value.nd_sbp)
        whole = tuple(B if sbp == Split(self.dim) else sbp for sbp in value.nd_sbp)
        shape = tuple(1 if d == self.dim else n for d, n in enumerate(value.tensor.shape))
        tensor = self._tensor(suffix, shape, value.tensor.dtype)
        self._append(
            suffix, target, (Ref(value.tensor.name), (self.dim,), True), (value.nd_sbp,), made
        )
        return _Value(tensor, whole)

    def pointwise(self, suffix: str, target: str, *values: _Value, **kwargs: Any) -> _Value:
        """An elementwise op: on each axis the output lies as an operand that is not B, else B."""
        shape = tuple(torch.broadcast_shapes(*(v.tensor.shape for v in values)))
        axes = zip(*(v.nd_sbp for v in values), strict=True)
        nd_sbp = tuple(next((sbp for sbp in axis if sbp != B), B) for axis in axes)
        tensor = self._tensor(suffix, shape, kwargs.get("dtype", values[0].tensor.dtype))
        args = tuple(Ref(v.tensor.name) for v in values)
        self._append(
            suffix, target, args, tuple(v.nd_sbp for v in values), nd_sbp, tuple(kwargs.items())
        )
        return _Value(tensor, nd_sbp)

    def finish(self) -> None:
        """The last op makes what the softmax made, in its dtype."""
        name = self.op.outputs[0]
        wanted = self.tensors.get(name or "")
        last = self.made[-1]
        if wanted is not None and wanted.dtype != last.dtype:
            value = _Value(last, self.ops[-1].out_sbp[0])
            self.pointwise("cast", "aten._to_copy.default", value, dtype=wanted.dtype)
        self.made.pop()
        self.ops[-1] = replace(self.ops[-1], outputs=self.op.outputs, out_sbp=self.op.out_sbp)

    def _tensor(self, suffix: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.made.append(Tensor(f"{self.op.name}_{suffix}", shape, dtype))
        return self.made[-1]

    def _append(
        self,
        suffix: str,
        target: str,
        args: tuple[Any, ...],
        in_sbp: tuple[NdSbp, ...],
        out_sbp: NdSbp,
        kwargs: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        name = f"{self.op.name}_{suffix}"
        self.ops.append(
            replace(
                self.op,
                name=name,
                target=target,
                args=args,
                kwargs=kwargs,
                outputs=(name,),
                in_sbp=in_sbp,
                out_sbp=(out_sbp,),
            )
        )


def _log_softmax(p: _Program) -> None:
    """x - max - log(sum(exp(x - max)))."""
    shifted, total = _shifted_exp_sum(p)[::2]
    log = p.pointwise("log", "aten.log.default", total)
    p.pointwise("out", "aten.sub.Tensor", shifted, log)
    p.finish()


def _softmax(p: _Program) -> None:
    """exp(x - max) / sum(exp(x - max))."""
    _, exp, total = _shifted_exp_sum(p)
    p.pointwise("out", "aten.div.Tensor", exp, total)
    p.finish()


def _shifted_exp_sum(p: _Program) -> tuple[_Value, _Value, _Value]:
    x = p.argument("self")
    largest = p.reduced("max", "aten.amax.default", x, P_MAX)
    shifted = p.pointwise("shift", "aten.sub.Tensor", x, largest)
    exp = p.pointwise("exp", "aten.exp.default", shifted)
    return shifted, exp, p.reduced("sum", "aten.sum.dim_IntList", exp, P)


def _log_softmax_backward(p: _Program) -> None:
    """grad - exp(output) * sum(grad)."""
    grad, output = p.argument("grad_output"), p.argument("output")
    total = p.reduced("sum", "aten.sum.dim_IntList", grad, P)
    exp = p.pointwise("exp", "aten.exp.default", output)
    share = p.pointwise("share", "aten.mul.Tensor", exp, total)
    p.pointwise("out", "aten.sub.Tensor", grad, share)
    p.finish()


def _softmax_backward(p: _Program) -> None:
    """output * (grad - sum(grad * output))."""
    grad, output = p.argument("grad_output"), p.argument("output")
    product = p.pointwise("product", "aten.mul.Tensor", grad, output)
    total = p.reduced("sum", "aten.sum.dim_IntList", product, P)
    centred = p.pointwise("centred", "aten.sub.Tensor", grad, total)
    p.pointwise("out", "aten.mul.Tensor", centred, output)
    p.finish()


_WRITE = {
    "aten._log_softmax.default": _log_softmax,
    "aten._softmax.default": _softmax,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
}
