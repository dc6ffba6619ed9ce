"""GraphBuilder: collects the ops that a pass adds to a graph, and puts all in topological order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Feed,
    LogicalGraph,
    LogicalTensor,
    Op,
    Ref,
    Variable,
)
from flowrun.engine.ops.math.pointwise import CAST


class OpPlace(NamedTuple):
    """The place of an op: its stage, the module that it is of, and its phase."""

    stage: int = 0
    module: str = ""
    phase: str = UPDATE

    @classmethod
    def of(cls, variable: Variable) -> OpPlace:
        """Return the place of the update of a variable."""
        return cls(variable.stage, variable.name.rpartition(".")[0])


AT_END = OpPlace()


class GraphBuilder:
    """base: the graph before the pass.  tensors, variables, feeds: those of the new graph."""

    def __init__(self, graph: LogicalGraph) -> None:
        self.base, self.own = graph, {v.name for v in graph.variables}
        self.tensors = dict(graph.tensors)
        self.variables: dict[str, Variable] = {v.name: v for v in graph.variables}
        self.feeds: dict[str, Feed] = {f.tensor: f for f in graph.feeds}
        self.added: list[Op] = []
        self.notes: list[str] = []
        self.dropped: set[str] = set()

    def tensor(self, name: str, like: LogicalTensor | None = None) -> str:
        """Add a tensor shaped as another, or an fp32 scalar, and return its name."""
        shape, dtype = (like.shape, like.dtype) if like else ((), torch.float32)
        self.tensors[name] = LogicalTensor(name, shape, dtype)
        return name

    def free_name(self, name: str) -> str:
        """Return a name for a state that no parameter and no buffer of the model has."""
        while name in self.own:
            name += "~"
        return name

    def op(
        self,
        name: str,
        target: str,
        args: tuple[object, ...],
        kwargs: tuple[tuple[str, object], ...] = (),
        outputs: tuple[str, ...] = (),
        at: OpPlace = AT_END,
    ) -> None:
        """Append an op whose outputs exist already, in the chunk of its inputs."""
        op = Op(name, target, args, kwargs, outputs=outputs, **at._asdict())
        sources = (self.base.producer.get(read) for read in op.inputs if at.phase != UPDATE)
        chunk = max((source.chunk for source in sources if source), default=0)
        self.added.append(replace(op, chunk=chunk))

    def one(
        self,
        name: str,
        target: str,
        args: tuple[object, ...],
        kwargs: tuple[tuple[str, object], ...] = (),
        like: LogicalTensor | None = None,
        at: OpPlace = AT_END,
    ) -> str:
        """Append an op with one output of its own name, and return that name.

        like: a tensor with the shape and dtype of the output; None: an fp32 scalar.
        """
        output = self.tensor(name, like)
        self.op(output, target, args, kwargs, (output,), at)
        return output

    def cast(self, name: str, tensor: str, dtype: torch.dtype, at: OpPlace) -> str:
        """Append a cast, and return its output; a tensor that has the dtype needs none."""
        like = self.tensors[tensor]
        if like.dtype == dtype:
            return tensor
        given = (("dtype", dtype),)
        return self.one(name, CAST, (Ref(tensor),), given, replace(like, dtype=dtype), at)

    def number(self, field: str, stage: int, values: tuple[float, ...] = ()) -> str:
        """Return a scalar that the stage's reader supplies once a step.

        field: its name, such as "@lr".  values: its value at each step, if they are known.
        """
        name = f"{field}@{stage}"
        if name not in self.feeds:
            tensor = self.tensor(name)
            self.feeds[name] = Feed(field, tensor, stage, per_step=True, values=values)
        return name

    def drop_dead(self, names: Iterable[str]) -> None:
        """Remove ops, and all ops that read their outputs."""
        gone: set[str] = set()
        wanted = set(names)
        for op in self.base.ops:
            if op.name in wanted or gone.intersection(op.inputs):
                gone.update(op.makes)
                self.dropped.add(op.name)
        self.tensors = {name: t for name, t in self.tensors.items() if name not in gone}

    def graph(self, results: tuple[tuple[str, str], ...]) -> LogicalGraph:
        """Return the new graph: forward, backward with its accumulators, update."""
        known = self.base.producer.keys()
        kept = [op for op in self.base.ops if op.name not in self.dropped]
        first: list[Op] = []
        sums: list[Op] = []
        after: list[Op] = []
        for op in self.added:
            before = first if known.isdisjoint(op.inputs) else sums
            (after if op.phase == UPDATE else before).append(op)
        forward, backward = ([op for op in kept if op.phase == p] for p in (FORWARD, BACKWARD))
        return replace(
            self.base,
            ops=(*_sums_after([*forward, *first, *backward], sums), *after),
            tensors=self.tensors,
            variables=tuple(self.variables.values()),
            feeds=tuple(self.feeds.values()),
            results=results,
            notes=(*self.base.notes, *self.notes),
        )


def _sums_after(ops: list[Op], sums: list[Op]) -> list[Op]:
    """Put accumulators directly after the op whose output they sum.

    Those of feeds, and those that backward needs of forward's values, go to the end.
    """
    after: dict[str, list[Op]] = {}
    late = {name for op in ops if op.phase == FORWARD for name in op.makes}
    tensors = {name for op in ops for name in op.makes}
    last: list[Op] = []
    for op in sums:
        source = op.inputs[0]
        elsewhere = source not in tensors or (op.phase != FORWARD and source in late)
        (last if elsewhere else after.setdefault(source, [])).append(op)
    out: list[Op] = []
    for op in ops:
        out.append(op)
        for name in op.makes:
            out.extend(after.get(name, ()))
    return out + last
