"""GraphBuilder: what a pass adds to a graph, collected; then everything in topological order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Feed,
    LogicalGraph,
    Op,
    Tensor,
    Variable,
)


class GraphBuilder:
    """base: the graph as it came.  tensors, variables, feeds: those of the graph to be."""

    def __init__(self, graph: LogicalGraph) -> None:
        self.base = graph
        self.tensors = dict(graph.tensors)
        self.variables: dict[str, Variable] = {v.name: v for v in graph.variables}
        self.feeds: dict[str, Feed] = {f.tensor: f for f in graph.feeds}
        self.added: list[Op] = []

    def tensor(self, name: str, like: Tensor | None = None) -> str:
        """A new tensor, shaped as another, or an fp32 scalar; its name."""
        shape, dtype = (like.shape, like.dtype) if like else ((), torch.float32)
        self.tensors[name] = Tensor(name, shape, dtype)
        return name

    def op(
        self,
        name: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
        outputs: tuple[str, ...] = (),
        *,
        module: str = "",
        phase: str = UPDATE,
        stage: int = 0,
    ) -> None:
        """Append an op; its outputs are tensors already."""
        self.added.append(Op(name, target, args, kwargs, outputs, module, phase, stage))

    def one(
        self,
        name: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
        *,
        like: Tensor | None = None,
        module: str = "",
        phase: str = UPDATE,
        stage: int = 0,
    ) -> str:
        """Append an op that makes one tensor of its own name; the name."""
        made = self.tensor(name, like)
        self.op(made, target, args, kwargs, (made,), module=module, phase=phase, stage=stage)
        return made

    def number(self, field: str, stage: int, values: tuple[float, ...] = ()) -> str:
        """A number of the engine's own: a scalar that the stage's reader supplies once a step."""
        name = f"{field}@{stage}"
        if name not in self.feeds:
            made = self.tensor(name)
            self.feeds[name] = Feed(field, made, stage, per_step=True, values=values)
        return name

    def drop_feed(self, field: str) -> Feed | None:
        """Take a feed out; None if there is none."""
        found = next((f for f in self.feeds.values() if f.field == field), None)
        if found is not None:
            del self.feeds[found.tensor]
        return found

    def graph(self, results: tuple[tuple[str, str], ...], level: str) -> LogicalGraph:
        """Everything together: forward, backward with its accumulators, update."""
        forward = [op for op in self.base.ops if op.phase == FORWARD]
        backward = [op for op in self.base.ops if op.phase == BACKWARD]
        micro = [op for op in self.added if op.phase != UPDATE]
        first = [op for op in micro if not any(name in self.base.producer for name in op.inputs)]
        sums = [op for op in micro if op not in first]
        after = [op for op in self.added if op.phase == UPDATE]
        return replace(
            self.base,
            ops=(*_sums_behind([*forward, *first, *backward], sums), *after),
            tensors=self.tensors,
            variables=tuple(self.variables.values()),
            feeds=tuple(self.feeds.values()),
            results=results,
            level=level,
        )


def _sums_behind(ops: list[Op], sums: list[Op]) -> list[Op]:
    """Accumulators directly behind the op whose output they sum."""
    behind: dict[str, list[Op]] = {}
    for op in sums:
        behind.setdefault(op.inputs[0], []).append(op)
    out: list[Op] = []
    for op in ops:
        out.append(op)
        for name in op.makes:
            out.extend(behind.get(name, ()))
    return out
