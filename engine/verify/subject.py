"""Subject: the graph that the rules look at, and what they ask about it again and again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.strategy import Strategy


@dataclass(frozen=True)
class Subject:
    """A graph and the strategy that it is compiled for."""

    graph: LogicalGraph
    strategy: Strategy

    def grid(self, stage: int) -> tuple[int, ...]:
        """Sizes of the axes of a stage."""
        return self.strategy.placements[stage].shape

    @cached_property
    def locations(self) -> dict[str, tuple[int, NdSbp]]:
        """Tensor -> the stage and nd-SBP in which it enters or is made."""
        places = {source.tensor: (source.stage, source.nd_sbp) for source in self.graph.sources}
        for op in self.graph.ops:
            for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=False):
                if name is not None:
                    places[name] = (op.stage, nd_sbp)
        return places
