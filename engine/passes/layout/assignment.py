"""Layout: what infer_sbp has decided so far, axis after axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.placement import Shape, left_over
from flowrun.engine.ir.sbp import NdSbp


class Layout:
    """Decisions so far: nd-SBPs of every op's inputs and outputs, homes, and forms of every tensor
    by axis.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        self.base = graph
        self.in_sbp: dict[str, list[NdSbp]] = {
            op.name: list(op.in_sbp) or [() for _ in op.inputs] for op in graph.ops
        }
        self.out_sbp: dict[str, list[NdSbp]] = {
            op.name: list(op.out_sbp) or [() for _ in op.outputs] for op in graph.ops
        }
        self.homes: dict[str, NdSbp] = {v.tensor: v.nd_sbp for v in graph.variables}
        self.homes.update({f.tensor: f.nd_sbp for f in graph.feeds})

    def graph(self, graph: LogicalGraph) -> LogicalGraph:
        """The graph with all decisions written into it."""
        return replace(
            graph,
            ops=tuple(
                replace(
                    op, in_sbp=tuple(self.in_sbp[op.name]), out_sbp=tuple(self.out_sbp[op.name])
                )
                for op in graph.ops
            ),
            variables=tuple(replace(v, nd_sbp=self.homes[v.tensor]) for v in graph.variables),
            feeds=tuple(replace(f, nd_sbp=self.homes[f.tensor]) for f in graph.feeds),
        )

    def shape(self, name: str, nd_sbp: NdSbp, axis: int, grid: Sequence[int]) -> Shape:
        """What the axes before `axis` leave over of a tensor in an nd-SBP."""
        return left_over(self.base.tensors[name].shape, nd_sbp[:axis], grid)

    def decided(self, name: str) -> NdSbp:
        """The nd-SBP that a tensor is made in, or lives in, on the axes so far."""
        if name in self.homes:
            return self.homes[name]
        op = self.base.producer[name]
        return self.out_sbp[op.name][op.outputs.index(name)]
