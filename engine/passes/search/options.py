"""Options: what is chosen of one graph: the row of every op, the home of all that enters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.passes.search.rows import AxisSignatures, RowTables

Choice = tuple[int, ...]  # a value for each variable: ops, then sources, then what a network adds


@dataclass(frozen=True)
class Options:
    """rows: of each op.  sources: tensors of weights and fields, with their homes.  tied: states,
    with the weight that each lives with.
    """

    ops: tuple[Op, ...]
    rows: tuple[tuple[AxisSignatures, ...], ...]
    sources: tuple[str, ...]
    homes: tuple[tuple[NdSbp, ...], ...]
    tied: Mapping[str, str]

    @staticmethod
    def of(graph: LogicalGraph, rows: RowTables) -> Options:
        """All that there is for a graph; rows: of its ops."""
        by_name = {v.name: v.tensor for v in graph.variables}
        states = (v for v in graph.variables if v.kind == "state" and v.of in by_name)
        tied = {v.tensor: by_name[v.of] for v in states}
        free = [source for source in graph.sources if source.tensor not in tied]
        return Options(
            graph.ops,
            tuple(map(rows.of, graph.ops)),
            tuple(source.tensor for source in free),
            tuple(map(rows.homes, free)),
            tied,
        )

    @property
    def sizes(self) -> list[int]:
        """Of the variables."""
        return [*map(len, self.rows), *map(len, self.homes)]

    @property
    def variables(self) -> dict[str, int]:
        """Source -> its variable."""
        return {name: len(self.ops) + k for k, name in enumerate(self.sources)}

    def homes_at(self, choice: Sequence[int]) -> dict[str, NdSbp]:
        """Where every source lives."""
        chosen = zip(self.sources, self.homes, choice[len(self.ops) :], strict=False)
        return {name: homes[k] for name, homes, k in chosen}
