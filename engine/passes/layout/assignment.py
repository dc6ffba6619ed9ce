"""Layout: the decisions of infer_sbp so far, axis after axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ir.placement import Shape, left_over
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.ir.signature import Signature


class Layout:
    """The nd-SBPs of every op's inputs and outputs and the homes of sources, on the axes decided
    so far.
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
        """Return the graph with all decisions written into it."""
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

    def append(self, op: Op, row: Signature) -> None:
        """Write down the row of an op on the next axis."""
        for known, added in (
            (self.in_sbp[op.name], row.inputs),
            (self.out_sbp[op.name], row.outputs),
        ):
            known[:] = [(*nd, sbp) for nd, sbp in zip(known, added, strict=True)]

    def shape(self, name: str, nd_sbp: NdSbp, axis: int, grid: Sequence[int]) -> Shape:
        """Return the shape that the axes before `axis` leave of a tensor.

        grid: sizes of the axes of its stage.
        """
        return left_over(self.base.tensors[name].shape, nd_sbp[:axis], grid)

    def nd_sbp_of(self, name: str) -> NdSbp:
        """Return the nd-SBP of a tensor at its maker, or at its home, on the axes so far."""
        if name in self.homes:
            return self.homes[name]
        op = self.base.producer[name]
        return self.out_sbp[op.name][op.outputs.index(name)]
