"""The choices of a layout: the rows of every op over all axes of its grid, and the homes of every
source.

A row for several axes is one row for each axis, outermost first, each on the shapes that the axes
before left (ops/registry.py has the rows).  A batch field may be split over any axis, and a weight
too.  Only names of axes say more: on axes of the batch (BATCH_AXES) fields are split along dim 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flowrun.engine.boxing.boxing import fits
from flowrun.engine.ir.graph import Feed, LogicalGraph, Op, Variable, map_refs
from flowrun.engine.ir.placement import Shape, left_over
from flowrun.engine.ir.sbp import B, NdSbp, S, Sbp
from flowrun.engine.ir.signature import Signature
from flowrun.engine.ops.registry import lift
from flowrun.engine.passes.layout.homes import feed_home, rows_on_axis, variable_homes
from flowrun.engine.strategy import Strategy

AxisSignatures = tuple[Signature, ...]  # one signature an axis
Choice = tuple[int, ...]  # a value for each variable: ops, then sources, then what a network adds


def inputs_of(row: AxisSignatures) -> tuple[NdSbp, ...]:
    """Return the nd-SBP of every input."""
    return tuple(zip(*(s.inputs for s in row), strict=True))


def outputs_of(row: AxisSignatures) -> tuple[NdSbp, ...]:
    """Return the nd-SBP of every output."""
    return tuple(zip(*(s.outputs for s in row), strict=True))


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
        others = ((v, graph.lives_with[v.name]) for v in graph.variables)
        tied = {v.tensor: by_name[of] for v, of in others if of != v.name}
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

    def choice_of(self, signed: LogicalGraph) -> Choice | None:
        """Return the choice of a graph that has signatures; None if one is not among these rows."""
        places: dict[int, dict[object, int]] = {}  # of rows, which equal ops share
        for rows in self.rows:
            if id(rows) not in places:
                ends = [(inputs_of(row), outputs_of(row)) for row in rows]
                places[id(rows)] = {end: k for k, end in reversed(list(enumerate(ends)))}
        lives = {source.tensor: source.nd_sbp for source in signed.sources}
        choice = [
            places[id(rows)].get((op.in_sbp, op.out_sbp))
            for op, rows in zip(signed.ops, self.rows, strict=True)
        ]
        choice += [
            homes.index(lives[name]) if lives[name] in homes else None
            for name, homes in zip(self.sources, self.homes, strict=True)
        ]
        chosen = tuple(k for k in choice if k is not None)
        return chosen if len(chosen) == len(choice) else None


class RowTables:
    """The rows of the ops of one graph; equal ops share them."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.graph = graph
        self.strategy = strategy
        self._known: dict[object, tuple[AxisSignatures, ...]] = {}

    def of(self, op: Op) -> tuple[AxisSignatures, ...]:
        """Return the legal rows on the grid of the op's stage; the first that is legal for all
        is all B.
        """
        ins = tuple(self.graph.tensors[name].shape for name in op.inputs)
        outs = tuple(None if n is None else self.graph.tensors[n].shape for n in op.outputs)
        grid = self.strategy.placements[op.stage].shape
        key = (op.target, map_refs((op.args, op.kwargs), lambda _: None), ins, outs, grid)
        if key not in self._known:
            self._known[key] = tuple(
                row
                for row in lift(partial(rows_on_axis, self.strategy, op), ins, outs, grid)
                if _fit(row, ins, outs, grid)
            )
        return self._known[key]

    def homes(self, source: Variable | Feed) -> tuple[NdSbp, ...]:
        """Return the nd-SBPs in which a variable or a batch field may live."""
        shape = self.graph.tensors[source.tensor].shape
        grid = self.strategy.placements[source.stage].shape
        options = self._homes(source, shape, 0)
        return tuple(home for home in options if fits(home, grid, shape))

    def _homes(self, source: Variable | Feed, shape: Shape, axis: int) -> Iterator[NdSbp]:
        if axis == len(self.strategy.axes):
            yield ()
            return
        parts = self.strategy.parts(source.stage, axis)
        for sbp in dict.fromkeys(self._homes_on(source, shape, axis)):
            for rest in self._homes(source, left_over(shape, (sbp,), (parts,)), axis + 1):
                yield (sbp, *rest)

    def _homes_on(self, source: Variable | Feed, shape: Shape, axis: int) -> Iterator[Sbp]:
        if not isinstance(source, Feed):
            yield from variable_homes(self.strategy, axis, source, shape, on_batch_axes=True)
            return
        parts = self.strategy.parts(source.stage, axis)
        home = feed_home(self.strategy, axis, source, shape)
        yield home
        pinned = self.strategy.axes[axis] in dict(source.pinned)
        free = home == B and not source.per_step and not pinned
        if free and shape and parts > 1 and not shape[0] % parts:
            yield S(0)


def _fit(
    row: AxisSignatures, ins: Iterable[Shape], outs: Iterable[Shape | None], grid: tuple[int, ...]
) -> bool:
    read = zip(inputs_of(row), ins, strict=True)
    outputs = ((nd, s) for nd, s in zip(outputs_of(row), outs, strict=True) if s is not None)
    return all(fits(nd, grid, shape) for nd, shape in (*read, *outputs))
