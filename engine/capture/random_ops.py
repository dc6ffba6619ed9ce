"""random_ops: a captured graph -> the same graph with the engine's own random ops.

Each random op of torch becomes a draw (ops/flow/random.py) followed by ordinary ops.  The name of
the op is the draw's stream, so that no two draws of a graph give the same numbers; backward reads
the tensor that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import Feed, LogicalGraph, LogicalTensor, Op, Ref, rename_inputs
from flowrun.engine.ir.signature import bind
from flowrun.engine.ops.traits import is_random

DRAW = "@draw"
Args = tuple[object, ...]


def seed_random_ops(graph: LogicalGraph, seed: int) -> LogicalGraph:
    """Return the graph with a draw of the engine in the place of each random op of torch.

    seed: seed of the run.  A graph that draws gets the feed "@draw".  Raise RecipeError for a
    random op that is not known.
    """
    writer = _DrawWriter(graph, seed)
    for old in graph.ops:
        writer.add(rename_inputs(old, writer.names))
    drawn = (Feed(DRAW, DRAW),) if DRAW in writer.tensors else ()
    return replace(
        graph,
        ops=tuple(writer.ops),
        tensors=writer.tensors,
        feeds=(*graph.feeds, *drawn),
        results=tuple((key, writer.names.get(name, name)) for key, name in graph.results),
    )


def _is_random(op: Op) -> bool:
    """Return whether torch calls the op random; attention without dropout draws nothing."""
    return is_random(op.target) and bind(op).get("dropout_p") != 0.0


class _DrawWriter:
    """The ops written so far.  names: a tensor that fell away -> the one in its place."""

    def __init__(self, graph: LogicalGraph, seed: int) -> None:
        self.seed = seed
        self.tensors = dict(graph.tensors)
        self.ops: list[Op] = []
        self.names: dict[str, str] = {}

    def add(self, op: Op) -> None:
        """Append an op, or what is in its place."""
        if op.target == "aten.native_dropout_backward.default" and bind(op)["scale"] == 1.0:
            self.pass_on(op, op.outputs[0])
        elif not _is_random(op):
            self.ops.append(op)
        elif write := _WRITE.get(op.target):
            write(self, op, bind(op))
        else:
            raise RecipeError(
                "model",
                f"flowrun does not support the random op {op.target} in module"
                f" {op.module or '(top level)'}.",
                f"Write it with one of: {', '.join(sorted(_WRITE))}.",
            )

    def pass_on(self, op: Op, output: str | None) -> None:
        """Let the op's first input stand for an output."""
        if output is not None:
            self.names[output] = op.inputs[0]

    def dtype(self, op: Op) -> torch.dtype:
        """Return that of the op's first used output."""
        return self.tensors[op.makes[0]].dtype

    def draw(self, op: Op, target: str, *args: object, dtype: torch.dtype | None = None) -> str:
        """Append a draw in the shape of the op's first used output; return what it makes.

        target: name of the draw, without "flow.".  args: its further arguments.  dtype: of the
        numbers; None: a mask.
        """
        self.tensors.setdefault(DRAW, LogicalTensor(DRAW, (), torch.int64))
        args = (Ref(DRAW), self.seed, op.name, self.tensors[op.makes[0]].shape, *args)
        kwargs = {} if dtype is None else {"dtype": dtype}
        return self._append(op, "drawn", f"flow.{target}", args, dtype or torch.bool, **kwargs)

    def then(
        self, op: Op, suffix: str, target: str, *args: object, dtype: torch.dtype | None = None
    ) -> str:
        """Append an elementwise torch op; return what it makes.

        suffix: ends its name.  target: name of the op, without "aten.".  args: strings are names of
        tensors.  dtype: of the result, if not that of the first tensor.
        """
        refs = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
        first = next(self.tensors[arg] for arg in args if isinstance(arg, str))
        kwargs = {"dtype": dtype} if target == "_to_copy.default" else {}
        return self._append(op, suffix, f"aten.{target}", refs, dtype or first.dtype, **kwargs)

    def _append(
        self, op: Op, suffix: str, target: str, args: Args, made: torch.dtype, **kwargs: object
    ) -> str:
        name, given = f"{op.name}_{suffix}", tuple(kwargs.items())
        self.tensors[name] = LogicalTensor(name, self.tensors[op.makes[0]].shape, made)
        new = replace(op, name=name, target=target, args=args, kwargs=given, outputs=(name,))
        self.ops.append(new)
        return name

    def finish(self, op: Op, tensor: str, at: int = 0) -> None:
        """Let the tensor be output `at` of the op."""
        output = op.outputs[at]
        if output is not None:
            assert self.tensors[output].dtype == self.tensors[tensor].dtype, (op, tensor)
            self.names[output] = tensor

    def scale(self, op: Op, tensor: str, factor: float, offset: float) -> str:
        """Append ops that compute factor * made + offset for a draw of `op`; return the result."""
        if factor != 1:
            tensor = self.then(op, "scaled", "mul.Scalar", tensor, factor)
        return self.then(op, "moved", "add.Scalar", tensor, offset) if offset != 0 else tensor


# ---- one function a kind of random op ------------------------------------------------------------

NamedArguments = Mapping[str, Any]


def _dropout(w: _DrawWriter, op: Op, given: NamedArguments) -> None:
    """Compute x * mask / (1 - p); nothing if nothing is dropped."""
    p = float(given["p"])
    if p == 0.0 or given["train"] is False:
        w.pass_on(op, op.outputs[0])
        p = 0.0
    mask = w.draw(op, "dropout_mask", p)
    w.finish(op, mask, 1)
    if p != 0.0 and op.outputs[0] is not None:
        kept = w.then(op, "kept", "mul.Tensor", op.inputs[0], mask)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        w.finish(op, w.then(op, "scaled", "mul.Scalar", kept, scale))


def _uniform(w: _DrawWriter, op: Op, given: NamedArguments) -> None:
    low, high = float(given.get("from") or 0.0), float(given.get("to", 1.0))
    drawn = w.draw(op, "uniform", dtype=w.dtype(op))
    w.finish(op, w.scale(op, drawn, high - low, low))


def _normal(w: _DrawWriter, op: Op, given: NamedArguments) -> None:
    drawn = w.draw(op, "normal", dtype=w.dtype(op))
    w.finish(op, w.scale(op, drawn, float(given.get("std", 1.0)), float(given.get("mean", 0.0))))


def _bernoulli(w: _DrawWriter, op: Op, given: NamedArguments) -> None:
    """Write 1 where a uniform number is below the probability, a number or a tensor."""
    drawn = w.draw(op, "uniform", dtype=torch.float32)
    p = given.get("p", Ref(op.inputs[0]))
    kind, p = ("Tensor", p.name) if isinstance(p, Ref) else ("Scalar", p)
    below = w.then(op, "below", f"lt.{kind}", drawn, p, dtype=torch.bool)
    w.finish(op, w.then(op, "out", "_to_copy.default", below, dtype=w.dtype(op)))


def _exponential(w: _DrawWriter, op: Op, given: NamedArguments) -> None:
    """Compute -log(1 - u) / lambda."""
    drawn = w.draw(op, "uniform", dtype=w.dtype(op))
    negative = w.then(op, "negative", "neg.default", drawn)
    log = w.then(op, "log", "log1p.default", negative)
    w.finish(op, w.then(op, "out", "mul.Scalar", log, -1.0 / float(given["lambd"])))


def _integers(w: _DrawWriter, op: Op, given: NamedArguments) -> None:
    low, high = int(given.get("low", 0)), int(given["high"])
    w.finish(op, w.draw(op, "integers", low, high, dtype=w.dtype(op)))


def _permutation(w: _DrawWriter, op: Op, given: NamedArguments) -> None:
    w.finish(op, w.draw(op, "permutation", dtype=w.dtype(op)))


_WRITE: Mapping[str, Callable[[_DrawWriter, Op, NamedArguments], None]] = {
    "aten.native_dropout.default": _dropout,
    "aten.rand.default": _uniform,
    "aten.rand_like.default": _uniform,
    "aten.uniform.default": _uniform,
    "aten.randn.default": _normal,
    "aten.randn_like.default": _normal,
    "aten.normal_functional.default": _normal,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.Tensor": _bernoulli,
    "aten.exponential.default": _exponential,
    "aten.randint.default": _integers,
    "aten.randint.low": _integers,
    "aten.randint_like.default": _integers,
    "aten.randint_like.low_dtype": _integers,
    "aten.randperm.default": _permutation,
}
