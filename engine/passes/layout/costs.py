"""Seconds that infer_sbp minimises on one axis: of a row itself, and of a boxing between two
forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from flowrun.engine.boxing.boxing import path_seconds
from flowrun.engine.cost.expansion_cost import expansion_cost
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.errors import SbpError
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.graph import BACKWARD, FORWARD, UPDATE, LogicalGraph, Op, gradient_of
from flowrun.engine.ir.placement import BATCH_AXES, LENGTH_AXES, Shape, left_over
from flowrun.engine.ir.sbp import B, NdSbp, Owned, P, Partial, Sbp, Split
from flowrun.engine.ir.signature import Signature
from flowrun.engine.ops.flow.update import ACCUMULATE
from flowrun.engine.passes.layout.axis_search import AxisLocation, AxisLocations, TensorOnAxis
from flowrun.engine.passes.layout.long_attention import ring_seconds
from flowrun.engine.strategy import Strategy

_ELEMENT_S = 1e-12  # seconds per element: so small that it only decides ties, in favour of splits


class Costs:
    """The costs on one axis.

    forms: of tensors decided before; the caller adds to it.  nd_sbp_of: of a tensor at its maker,
    or its home, on the axes so far.
    """

    def __init__(
        self,
        graph: LogicalGraph,
        strategy: Strategy,
        axis: int,
        forms: Mapping[str, AxisLocations],
        nd_sbp_of: Callable[[str], NdSbp],
    ) -> None:
        self.tensors = graph.tensors
        self.strategy = strategy
        self.axis = axis
        self.forms = forms
        self.nd_sbp_of = nd_sbp_of
        self.links = tuple(strategy.hardware.links(p)[axis] for p in strategy.placements)
        stages = [(p.shape, k) for p, k in zip(strategy.placements, self.links, strict=True)]
        self._alike = tuple(map(stages.index, stages))
        self.divides_batch = strategy.axes[axis] in BATCH_AXES + LENGTH_AXES
        self.trained = _trained_tensors(graph)
        self._works: dict[tuple[object, ...], float] = {}
        # with the legal rows, whose id is in the key
        self._rows: dict[object, tuple[object, list[tuple[Signature, float]]]] = {}

    def rows(
        self,
        op: Op,
        legal: Sequence[Signature],
        in_shapes: Sequence[Shape],
        out_shapes: Sequence[Shape | None],
    ) -> list[tuple[Signature, float]]:
        """Return rows with their seconds; equal ops of repeated blocks share one list."""
        dtypes = [self.tensors[name].dtype for name in (*op.inputs, *op.makes)]
        trained = [name in self.trained for name in op.inputs]
        key = (id(legal), op.phase, self._alike[op.stage], *in_shapes, *out_shapes, *dtypes)
        key = op.target, *key, *trained
        if op.target == ACCUMULATE or key not in self._rows:
            rows = [(row, self.row(op, row, in_shapes, out_shapes)) for row in legal]
            self._rows[key] = legal, rows
        return self._rows[key][1]

    def row(
        self, op: Op, row: Signature, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]
    ) -> float:
        """Return the seconds of a row of an op.

        in_shapes, out_shapes: what the axes before left of its tensors.
        """
        cost, parts = 0.0, self.strategy.parts(op.stage, self.axis)
        if row.travels:
            cost += self._expansion(op, row, in_shapes, out_shapes, parts)
        elif self.divides_batch and parts > 1:
            cost += self._work(op, row, in_shapes, out_shapes, parts)
        elif op.phase == FORWARD:
            cost += self._gradients(op, row, in_shapes, parts)
        for sbps, shapes in ((row.inputs, in_shapes), (row.outputs, out_shapes)):
            for sbp, shape in zip(sbps, shapes, strict=True):
                count = math.prod(shape or ())
                cost += _ELEMENT_S * (count / parts if isinstance(sbp, Split | Owned) else count)
        if row.reduced:
            cost += _seconds(P, B, parts, (row.reduced,), row.reduced * 4, self.links[op.stage])
        if row.turned:
            cost += self._around(op, row, in_shapes, parts)
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
        """Return the seconds of what each rank computes.

        On an axis of the batch the samples are there to be divided, on one of the length their
        tokens, so an op that every rank runs whole costs its time.  On other axes pins say which
        ops are split, and the rest is meant to be whole.
        """
        ins = [
            s if k in row.turned else _part(s, sbp, parts)
            for k, (s, sbp) in enumerate(zip(in_shapes, row.inputs, strict=True))
        ]
        outs = [
            None if s is None else _part(s, sbp, parts)
            for s, sbp in zip(out_shapes, row.outputs, strict=True)
        ]
        tensors = self.tensors
        dtype = tensors[(*op.makes, *op.inputs)[0]].dtype
        key = (op.target, op.phase, dtype, *ins, *outs)
        if key not in self._works:
            self._works[key] = SizedOp(op, ins, outs, tensors).seconds(self.strategy.hardware)
        owned = any(isinstance(sbp, Owned) for sbp in row.outputs)  # each rank owns as much
        return self._works[key] / parts if owned else self._works[key]

    def _expansion(
        self,
        op: Op,
        row: Signature,
        in_shapes: Sequence[Shape],
        out_shapes: Sequence[Shape | None],
        parts: int,
    ) -> float:
        """Return the seconds of what a row becomes; where work is not counted (`_work`), of its
        boxings alone.
        """
        names, shapes = (*op.inputs, *op.outputs), (*in_shapes, *out_shapes)
        left = {
            name: replace(self.tensors[name], shape=shape)
            for name, shape in zip(names, shapes, strict=True)
            if name is not None and shape is not None
        }
        in_sbp, out_sbp = (tuple((sbp,) for sbp in side) for side in (row.inputs, row.outputs))
        op = replace(op, in_sbp=in_sbp, out_sbp=out_sbp)
        links = (self.links[op.stage],)
        cost = expansion_cost(op, left, (parts,), links, self.strategy.hardware)
        return cost.boxing_s + self.divides_batch * cost.work_s

    def _around(self, op: Op, row: Signature, in_shapes: Sequence[Shape], parts: int) -> float:
        """Return the seconds that a row waits for what goes around: a block comes while a device
        computes with the one before.
        """
        seconds = ring_seconds(op, row, in_shapes, self.tensors, parts, self.links[op.stage])
        if self.strategy.hardware.device == "cpu":  # cores copy what is sent
            return seconds
        out_shapes = [None if n is None else self.tensors[n].shape for n in op.outputs]
        return max(0.0, seconds - self._work(op, row, in_shapes, out_shapes, parts))

    def _gradients(self, op: Op, row: Signature, in_shapes: Sequence[Shape], parts: int) -> float:
        """Return the seconds of reducing the gradients of weights that a row of forward reads
        whole.

        If the result of the op is split, such a gradient is a partial sum.  Forward is decided
        before backward and must count these bytes; latency is left out, since gradients of a step
        share messages.  It applies to axes other than those of the batch, where all weights are
        whole.
        """
        if not any(isinstance(sbp, Split) for sbp in row.outputs):
            return 0.0
        num_bytes = sum(
            self.tensors[name].dtype.itemsize * math.prod(shape)
            for name, sbp, shape in zip(op.inputs, row.inputs, in_shapes, strict=True)
            if sbp == B and name in self.trained
        )
        moved = 2 * (parts - 1) / parts * num_bytes  # by each rank of an all-reduce
        return moved / self.links[op.stage].bytes_per_s / self.strategy.micro_batches

    def _to_home(self, op: Op, row: Signature, shape: Shape, parts: int) -> float:
        """Return the seconds of boxing a gradient to its weight's home: a part of the
        accumulator's row.
        """
        name = op.outputs[0] or ""
        weight = gradient_of(name)
        if weight not in self.forms:
            return 0.0
        home = next(iter(self.forms[weight]))[1]
        num_bytes = self.tensors[name].dtype.itemsize * math.prod(shape)
        once_a_step = 0.99 / self.strategy.micro_batches  # below 1: rather late than early
        link = self.links[op.stage]
        return once_a_step * _seconds(row.outputs[0], home, parts, shape, num_bytes, link)

    def like(self, name: str) -> TensorOnAxis:
        """Return the facts of a tensor on which the seconds of its boxings depend."""
        tensor = self.tensors[name]
        nd_sbp = self.nd_sbp_of(name)[: self.axis]
        return TensorOnAxis(tensor.shape, nd_sbp, tensor.dtype.itemsize)

    def alike(self, stage: int) -> int:
        """Return the first stage on which boxings cost what they cost on this one."""
        return self._alike[stage]

    def box(self, tensor: TensorOnAxis, have: AxisLocation, wanted: AxisLocation) -> float:
        """Return the seconds of boxing a tensor from one form to another, on a stage or between
        two.
        """
        if have == wanted:
            return 0.0
        (stage, source), (to_stage, target) = have, wanted
        placements, parts = self.strategy.placements, self.strategy.parts(stage, self.axis)
        shape = left_over(tensor.shape, tensor.nd_sbp, placements[stage].shape)
        num_bytes = tensor.itemsize * math.prod(shape)
        if stage == to_stage:
            return _seconds(source, target, parts, shape, num_bytes, self.links[stage])
        crossing = self.strategy.hardware.crossing(placements[stage], placements[to_stage])
        cost = crossing.message_seconds(num_bytes)
        if isinstance(source, Partial) and parts > 1:
            cost += _seconds(source, B, parts, shape, num_bytes, self.links[stage])
        if isinstance(source, Split) and not isinstance(target, Split):
            cost += num_bytes / crossing.bytes_per_s
        return cost


def _trained_tensors(graph: LogicalGraph) -> frozenset[str]:
    """Return parameters that have a gradient, and tensors that a step makes of them alone."""
    trained = {v.tensor for v in graph.variables if v.kind == "parameter" and v.new}
    for op in graph.ops:
        if op.phase != UPDATE and op.inputs and trained.issuperset(op.inputs):
            trained.update(op.makes)
    return frozenset(trained)


def _part(shape: Shape, sbp: Sbp, parts: int) -> Shape:
    """Return the shape of the largest piece of a tensor."""
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
