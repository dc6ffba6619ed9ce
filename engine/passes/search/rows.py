"""Rows of an op over all axes of its grid, and homes of sources: the choices of the search.

A row for several axes is one row for each axis, outermost first, each on the shapes that the axes
before left (ops/registry.py has the rows).  A batch field may be split over any axis, and a weight
too.  Only names of axes say more: on axes of the batch (BATCH_AXES) fields are split along dim 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from flowrun.engine.boxing.boxing import fits
from flowrun.engine.ir.graph import Feed, LogicalGraph, Op, Variable, map_refs
from flowrun.engine.ir.placement import Shape, left_over
from flowrun.engine.ir.sbp import B, NdSbp, S, Sbp
from flowrun.engine.ir.signature import Signature
from flowrun.engine.ops.registry import lift
from flowrun.engine.passes.layout.homes import feed_home, rows_on_axis, variable_homes
from flowrun.engine.passes.layout.pin_activations import names_field
from flowrun.engine.strategy import Strategy

AxisSignatures = tuple[Signature, ...]  # one signature an axis


def inputs_of(row: AxisSignatures) -> tuple[NdSbp, ...]:
    """Return the nd-SBP of every input."""
    return tuple(zip(*(s.inputs for s in row), strict=True))


def outputs_of(row: AxisSignatures) -> tuple[NdSbp, ...]:
    """Return the nd-SBP of every output."""
    return tuple(zip(*(s.outputs for s in row), strict=True))


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
        key = (op.target, map_refs((op.args, op.kwargs), _nameless), ins, outs, grid)
        if key not in self._known:
            self._known[key] = tuple(
                row
                for row in lift(partial(rows_on_axis, self.strategy, op), ins, outs, grid)
                if _fit(row, ins, outs, grid)
            )
        return self._known[key]

    # ------------------------------------------------------------------ what enters

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
        parts = self.strategy.parts(source.stage, axis)
        if isinstance(source, Feed):
            home = feed_home(self.strategy, axis, source, shape)
            yield home
            free = home == B and not source.per_step and not self._is_pinned(source, axis)
            if free and shape and parts > 1 and not shape[0] % parts:
                yield S(0)
        else:
            yield from variable_homes(self.strategy, axis, source, shape, on_batch_axes=True)

    def _is_pinned(self, feed: Feed, axis: int) -> bool:
        pins = (pin for pin in self.strategy.pins if pin.axis == self.strategy.axes[axis])
        return any(names_field(pin, feed) for pin in pins)


def _nameless(_: object) -> None:
    return None


def _fit(
    row: AxisSignatures, ins: Iterable[Shape], outs: Iterable[Shape | None], grid: tuple[int, ...]
) -> bool:
    read = zip(inputs_of(row), ins, strict=True)
    outputs = ((nd, s) for nd, s in zip(outputs_of(row), outs, strict=True) if s is not None)
    return all(fits(nd, grid, shape) for nd, shape in (*read, *outputs))
