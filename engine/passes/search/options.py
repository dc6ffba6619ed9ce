"""Options: the choices of a layout: the row of every op, and the home of every source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.passes.search.rows import AxisSignatures, RowTables

Choice = tuple[int, ...]  # a value for each variable: ops, then sources, then what a network adds


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices of one graph.

    rows: of each op.  sources: tensors of weights and fields, with their homes.  tied: state -> the
    weight that it lives with.
    """

    ops: tuple[Op, ...]
    rows: tuple[tuple[AxisSignatures, ...], ...]
    sources: tuple[str, ...]
    homes: tuple[tuple[NdSbp, ...], ...]
    tied: Mapping[str, str]

    @staticmethod
    def of(graph: LogicalGraph, rows: RowTables) -> Options:
        """Return the options of a graph.  rows: of its ops."""
        by_name = {v.name: v.tensor for v in graph.variables}
        states = (v for v in graph.variables if v.kind == "state" and v.of in by_name)
        tied = {v.tensor: by_name[v.of] for v in states}
        free = [source for source in graph.sources if source.tensor not in tied]
        return Options(
            ops=graph.ops,
            rows=tuple(map(rows.of, graph.ops)),
            sources=tuple(source.tensor for source in free),
            homes=tuple(map(rows.homes, free)),
            tied=tied,
        )

    @property
    def sizes(self) -> list[int]:
        """The number of values of each variable."""
        return [*map(len, self.rows), *map(len, self.homes)]

    @property
    def variables(self) -> dict[str, int]:
        """Source -> its variable."""
        return {name: len(self.ops) + k for k, name in enumerate(self.sources)}

    def homes_at(self, choice: Sequence[int]) -> dict[str, NdSbp]:
        """Return the home of every source for a choice."""
        chosen = zip(self.sources, self.homes, choice[len(self.ops) :], strict=False)
        return {name: homes[k] for name, homes, k in chosen}
