"""Seconds that infer_sbp weighs on one axis: of a row itself, and of a boxing between two forms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from flowrun.engine.boxing.boxing import path_seconds
from flowrun.engine.cost.op_cost import op_seconds
from flowrun.engine.errors import SbpError
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.graph import BACKWARD, FORWARD, UPDATE, LogicalGraph, Op, gradient_of
from flowrun.engine.ir.placement import BATCH_AXES, Shape
from flowrun.engine.ir.sbp import B, P, Partial, Sbp, Split
from flowrun.engine.ops.flow.update import ACCUMULATE
from flowrun.engine.ops.signature import Signature
from flowrun.engine.passes.layout.assignment import Layout
from flowrun.engine.passes.layout.axis_search import AxisLocation, AxisLocations
from flowrun.engine.strategy import Strategy

_ELEMENT_S = 1e-12  # of one element computed: splits win ties, boxing never loses to it


class TensorOnAxis(NamedTuple):
    """A tensor on the ranks of an axis: how many, the shape and bytes that the axes before left
    over, and what joins the ranks.
    """

    parts: int
    shape: Shape
    num_bytes: int
    link: Link

    def seconds(self, have: Sbp, wanted: Sbp) -> float:
        """Of a boxing."""
        return _seconds(have, wanted, *self)


class Costs:
    """On one axis.  forms: of tensors decided before; it grows."""

    def __init__(
        self, layout: Layout, strategy: Strategy, axis: int, forms: Mapping[str, AxisLocations]
    ) -> None:
        self.layout = layout
        self.strategy = strategy
        self.axis = axis
        self.forms = forms
        self.links = tuple(strategy.hardware.links(p)[axis] for p in strategy.placements)
        self.divides_batch = strategy.axes[axis] in BATCH_AXES
        self.trained = _trained(layout.base)
        self._works: dict[tuple[object, ...], float] = {}

    def row(
        self,
        op: Op,
        row: Signature,
        in_shapes: Sequence[Shape],
        out_shapes: Sequence[Shape | None],
    ) -> float:
        """Of a row, on shapes that the axes before left over."""
        cost, parts = 0.0, self.strategy.parts(op.stage, self.axis)
        if self.divides_batch and parts > 1:
            cost += self._work(op, row, in_shapes, out_shapes, parts)
        elif op.phase == FORWARD:
            cost += self._gradients(op, row, in_shapes, parts)
        for sbps, shapes in ((row.inputs, in_shapes), (row.outputs, out_shapes)):
            for sbp, shape in zip(sbps, shapes, strict=True):
                count = math.prod(shape or ())
                cost += _ELEMENT_S * (count / parts if isinstance(sbp, Split) else count)
        if row.reduced:
            cost += _seconds(P, B, parts, (row.reduced,), row.reduced * 4, self.links[op.stage])
        if op.target == ACCUMULATE and op.phase == BACKWARD:
            cost += self._to_home(op, row, in_shapes[0], parts)
        return cost

    def _work(
        self,
        op: Op,
        row: Signature,
        in_shapes: Sequence[Shape],
        out_shapes: Sequence[Shape | None],
        parts: int,
    ) -> float:
        """Seconds of what each rank computes: on an axis of the batch the samples are there to be
        divided, and what every rank computes alike is paid for.  Elsewhere pins say what is split,
        and the rest is meant to be whole.
        """
        ins = [_part(s, sbp, parts) for s, sbp in zip(in_shapes, row.inputs, strict=True)]
        outs = [
            None if s is None else _part(s, sbp, parts)
            for s, sbp in zip(out_shapes, row.outputs, strict=True)
        ]
        tensors = self.layout.base.tensors
        dtype = tensors[(*op.makes, *op.inputs)[0]].dtype
        key = (op.target, op.phase, dtype, *ins, *outs)
        if key not in self._works:
            self._works[key] = op_seconds(op, ins, outs, tensors, self.strategy.hardware)
        return self._works[key]

    def _gradients(self, op: Op, row: Signature, in_shapes: Sequence[Shape], parts: int) -> float:
        """A weight that is whole where the result is split has a gradient in parts, which backward
        sums.  Forward is decided before backward, and pays for its bytes: gradients of a step may
        share a message.  On an axis of the batch all weights are so.
        """
        if not any(isinstance(sbp, Split) for sbp in row.outputs):
            return 0.0
        tensors = self.layout.base.tensors
        num_bytes = sum(
            tensors[name].dtype.itemsize * math.prod(shape)
            for name, sbp, shape in zip(op.inputs, row.inputs, in_shapes, strict=True)
            if sbp == B and name in self.trained
        )
        moved = 2 * (parts - 1) / parts * num_bytes  # by each rank of an all-reduce
        return moved / self.links[op.stage].bytes_per_s / self.strategy.micro_batches

    def _to_home(self, op: Op, row: Signature, shape: Shape, parts: int) -> float:
        """A gradient ends at its weight's home: the boxing that it will need is part of the row's
        cost.
        """
        name = op.outputs[0] or ""
        weight = gradient_of(name)
        if weight not in self.forms:
            return 0.0
        home = next(iter(self.forms[weight]))[1]
        num_bytes = self.layout.base.tensors[name].dtype.itemsize * math.prod(shape)
        once_a_step = 0.99 / self.strategy.micro_batches  # and late rather than early, where m = 1
        link = self.links[op.stage]
        return once_a_step * _seconds(row.outputs[0], home, parts, shape, num_bytes, link)

    def like(self, name: str, stage: int) -> TensorOnAxis:
        """What decides the cost of boxing a tensor on a stage."""
        grid = self.strategy.placements[stage].shape
        shape = self.layout.shape(name, self.layout.decided(name), self.axis, grid)
        num_bytes = self.layout.base.tensors[name].dtype.itemsize * math.prod(shape)
        return TensorOnAxis(
            self.strategy.parts(stage, self.axis), shape, num_bytes, self.links[stage]
        )

    def box(self, name: str, have: AxisLocation, wanted: AxisLocation) -> float:
        """Of a tensor from one form to another, on this stage or between two."""
        if have == wanted:
            return 0.0
        (stage, source), (to_stage, target) = have, wanted
        placements = self.strategy.placements
        parts, _, num_bytes, _ = like = self.like(name, stage)
        if stage == to_stage:
            return like.seconds(source, target)
        crossing = self.strategy.hardware.crossing(placements[stage], placements[to_stage])
        cost = crossing.message_seconds(num_bytes)
        if isinstance(source, Partial) and parts > 1:
            cost += like.seconds(source, B)
        if isinstance(source, Split) and not isinstance(target, Split):
            cost += num_bytes / crossing.bytes_per_s
        return cost


def _trained(graph: LogicalGraph) -> frozenset[str]:
    """Parameters that have a gradient, and what a step makes of them before forward reads it."""
    found = {v.tensor for v in graph.variables if v.kind == "parameter" and v.new}
    for op in graph.ops:
        if op.phase != UPDATE and op.inputs and found.issuperset(op.inputs):
            found.update(op.makes)
    return frozenset(found)


def _part(shape: Shape, sbp: Sbp, parts: int) -> Shape:
    """The largest piece."""
    if not isinstance(sbp, Split):
        return shape
    dim = sbp.dim
    return (*shape[:dim], -(-shape[dim] // parts), *shape[dim + 1 :])


@lru_cache(maxsize=100_000)
def _seconds(have: Sbp, wanted: Sbp, parts: int, shape: Shape, num_bytes: int, link: Link) -> float:
    if have == wanted or parts == 1:
        return 0.0
    try:
        return path_seconds((have,), (wanted,), (parts,), shape, num_bytes, (link,))
    except SbpError:
        return 1e6
