"""Objective: the cost of a layout in seconds of one training step and in bytes that a rank holds.

    seconds   of every op on the shapes that the busiest rank holds (cost/op_cost.py), and of every
              boxing (boxing.py) with `wait_s` for the acts that it adds; both as often as they
              happen in a step.  With stages: of all stages together.
    hidden    seconds of a boxing that overlap with compute (trunk.py) count little: they still use
              a link and some memory bandwidth, and among equals the fewest bytes win.  Where the
              loop's own thread moves the bytes (shared memory), nothing is hidden
    bytes     weights with their states, accumulated gradients, activations stored for backward,
              and copies of all of these in other forms

A held byte costs as much as reading it a number of times from memory (cost_network.py, `_weigh`).
So the objective is a sum of terms that each depend on a few choices, which makes it searchable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flowrun.engine.actors.schedules import schedule_of
from flowrun.engine.boxing.boxing import path_seconds, start_seconds, states, step_seconds
from flowrun.engine.boxing.crossing import transfer_sbps
from flowrun.engine.cost.expansion_cost import expansion_cost
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.errors import SbpError
from flowrun.engine.ir.graph import LogicalGraph, Op, Variable
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import Shape, largest_shape
from flowrun.engine.ir.sbp import B, NdSbp, P
from flowrun.engine.ir.signature import NdSignature
from flowrun.engine.ops.traits import has
from flowrun.engine.passes.layout.long_attention import ring_seconds
from flowrun.engine.passes.recompute import find_stored
from flowrun.engine.passes.search.options import AxisSignatures, outputs_of
from flowrun.engine.passes.search.trunk import hidden_seconds
from flowrun.engine.strategy import Strategy

Array = npt.NDArray[np.float64]

HIDDEN_SHARE = 0.05  # seconds that a hidden second counts


class Objective:
    """The objective of one graph of forward, backward and update under one strategy."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.graph = graph
        self.strategy = strategy
        self.auto = strategy.auto
        hardware = strategy.hardware
        self.wait_s = 2 * hardware.act_s if self.auto.wait_time is None else self.auto.wait_time
        self.links = tuple(map(hardware.links, strategy.placements))
        self.stored = find_stored(graph, strategy)
        self.hidden: Mapping[str, float] = {}
        self._once = graph.of_weights | {
            name
            for op in graph.ops
            if op.per_step or has(op.target, Trait.SUM)
            for name in op.makes
        }
        self._once |= {feed.tensor for feed in graph.feeds if feed.per_step}
        self._rows: dict[object, tuple[Array, Array]] = {}
        self._times: dict[tuple[int, int], Array] = {}
        self._boxings: dict[object, float] = {}
        self._between: dict[tuple[int, int], int] = {}
        self._kinds: dict[object, int] = {}

    def hide(self, least_s: Mapping[str, float]) -> None:
        """Let compute hide boxings, unless all axes block.

        least_s: op name -> its seconds in the cheapest row.
        """
        if self.auto.trunk and not {*self.strategy.axes} <= {*self.strategy.blocking}:
            levels = self.strategy.hardware.levels
            carried = {
                stage
                for stage, links in enumerate(self.links)
                if any(k.level >= 0 and levels[k.level].shared_memory for k in links)
            }
            self.hidden = hidden_seconds(self.graph, least_s, carried)

    def visible_seconds(self, seconds: Array, hidden: float) -> Array:
        """Return the cost of boxings in seconds, of which `hidden` seconds overlap with compute."""
        return np.maximum(seconds - hidden, HIDDEN_SHARE * seconds)

    # ------------------------------------------------------------------ rows

    def times(self, op: Op) -> int:
        """Return the runs of an op in a step; ops on weights alone will be hoisted
        (hoist_weights.py).
        """
        once = op.per_step or (bool(op.makes) and self.graph.of_weights.issuperset(op.makes))
        return 1 if once else self.strategy.micro_batches

    def row_seconds(self, op: Op, rows: Sequence[AxisSignatures]) -> Array:
        """Return the seconds of every row of an op, in a step."""
        seconds, times = self._of_rows(op, rows)[0], self.times(op)
        return self._times.setdefault((id(seconds), times), seconds * times)

    def row_bytes(self, op: Op, rows: Sequence[AxisSignatures]) -> Array:
        """Return the bytes of an op's outputs that a rank holds, for every row: gradients and
        stored tensors.
        """
        return self._of_rows(op, rows)[1]

    def _of_rows(self, op: Op, rows: Sequence[AxisSignatures]) -> tuple[Array, Array]:
        tensors = self.graph.tensors
        held = tuple(name in self.stored or has(op.target, Trait.SUM) for name in op.outputs)
        kinds = tuple((tensors[n].shape, tensors[n].dtype) for n in (*op.inputs, *op.makes))
        stage = (self.links[op.stage], self._held(op) if any(held) else 0)
        key = (op.target, op.phase, stage, kinds, held, id(rows))  # RowTables keeps them alive
        if key not in self._rows:
            costs = [self._row(op, row, held) for row in rows]
            self._rows[key] = (np.array([s for s, _ in costs]), np.array([b for _, b in costs]))
        return self._rows[key]

    def _row(self, op: Op, row: AxisSignatures, held: Sequence[bool]) -> tuple[float, float]:
        tensors, grid = self.graph.tensors, self.strategy.placements[op.stage].shape
        outs = [
            None if name is None else largest_shape(tensors[name].shape, nd, grid)
            for name, nd in zip(op.outputs, outputs_of(row), strict=True)
        ]
        seconds = self._seconds(op, row, outs)
        num_bytes = sum(
            math.prod(shape) * tensors[name].dtype.itemsize
            for name, shape, keep in zip(op.outputs, outs, held, strict=True)
            if keep and name is not None and shape is not None
        )
        in_flight = 1 if has(op.target, Trait.SUM) else self._held(op)
        return seconds, float(num_bytes * in_flight)

    def _seconds(self, op: Op, row: AxisSignatures, out_shapes: Sequence[Shape | None]) -> float:
        tensors, grid = self.graph.tensors, self.strategy.placements[op.stage].shape
        hardware, ratio = self.strategy.hardware, self.auto.computation_cost_ratio
        if any(axis.travels for axis in row):
            both = NdSignature.of(row)
            op = replace(op, in_sbp=both.inputs, out_sbp=both.outputs)
            cost = expansion_cost(op, tensors, grid, self.links[op.stage], hardware)
            return ratio * cost.work_s + cost.boxing_s + cost.moves * self.wait_s
        ins = [
            largest_shape(tensors[name].shape, nd, grid)
            for name, nd in zip(op.inputs, _read(op, row), strict=True)
        ]
        sized = SizedOp(op, ins, out_shapes, tensors)
        return ratio * sized.seconds(hardware) + self._inside(op, row, ins)

    def _inside(self, op: Op, row: AxisSignatures, in_shapes: Sequence[Shape]) -> float:
        """Return the seconds of what a row's expansion sends."""
        grid, links = self.strategy.placements[op.stage].shape, self.links[op.stage]
        whole: NdSbp = (B,) * len(grid)
        seconds = 0.0
        for axis, signature in enumerate(row):
            if signature.reduced and grid[axis] > 1:
                parts: NdSbp = (*whole[:axis], P, *whole[axis + 1 :])
                count = signature.reduced
                seconds += path_seconds(parts, whole, grid, (count,), 4 * count, links)
                seconds += self.wait_s
            tensors = self.graph.tensors
            seconds += ring_seconds(op, signature, in_shapes, tensors, grid[axis], links[axis])
        return seconds

    def _held(self, op: Op) -> int:
        """Return the micro-batches whose activations a stage stores, according to the schedule."""
        return schedule_of(self.strategy).slots(op.stage, op.chunk)

    # ------------------------------------------------------------------ homes

    def home_bytes(self, variable: Variable, home: NdSbp) -> float:
        """Return the bytes of a variable on the rank with the largest shard."""
        return self._local_bytes(variable.tensor, Location(variable.stage, home))

    def _local_bytes(self, name: str, form: Location) -> float:
        tensor, grid = self.graph.tensors[name], self.strategy.placements[form.stage].shape
        return math.prod(largest_shape(tensor.shape, form.nd_sbp, grid)) * tensor.dtype.itemsize

    # ------------------------------------------------------------------ boxings

    def box_times(self, name: str) -> int:
        """Return how often a tensor is boxed in a step."""
        return 1 if name in self._once else self.strategy.micro_batches

    def copy_bytes(self, name: str, form: Location) -> float:
        """Return the bytes that a rank holds if a tensor exists in one more form."""
        held = name in self.graph.of_weights or name in self.stored
        return self._local_bytes(name, form) if held else 0.0

    def box_seconds(self, name: str, have: Location, wanted: Location) -> float:
        """Return the seconds of one boxing of a tensor, with its acts, before any are hidden."""
        if have == wanted:
            return 0.0
        tensor, between = self.graph.tensors[name], self.kind(have.stage, wanted.stage)
        key = (tensor.shape, tensor.dtype.itemsize, between, have.nd_sbp, wanted.nd_sbp)
        if key not in self._boxings:
            try:
                seconds = self._box_seconds(tensor.shape, tensor.dtype.itemsize, have, wanted)
            except SbpError:
                seconds = math.inf
            self._boxings[key] = seconds
        return self._boxings[key]

    def kind(self, stage: int, to_stage: int) -> int:
        """Return a number that pairs of stages share between which boxings cost the same."""
        if (stage, to_stage) not in self._between:
            hardware, ends = self.strategy.hardware, (stage, to_stage)
            placements = [self.strategy.placements[each] for each in ends]
            kind = (
                tuple(
                    (p.shape, self.links[each]) for p, each in zip(placements, ends, strict=True)
                ),
                stage != to_stage
                and (hardware.crossing(*placements), hardware.is_far(*placements)),
            )
            self._between[ends] = self._kinds.setdefault(kind, len(self._kinds))
        return self._between[stage, to_stage]

    def _box_seconds(self, shape: Shape, itemsize: int, have: Location, wanted: Location) -> float:
        (stage, source), (to_stage, target) = have, wanted
        num_bytes = itemsize * math.prod(shape)
        if stage == to_stage:
            return self._along(stage, source, target, shape, num_bytes)
        placements = self.strategy.placements
        crossing = self.strategy.hardware.crossing(placements[stage], placements[to_stage])
        far = self.strategy.hardware.is_far(placements[stage], placements[to_stage])
        sent, received = transfer_sbps(
            placements[stage], source, placements[to_stage], target, shape, far
        )
        moved = itemsize * math.prod(largest_shape(shape, received, placements[to_stage].shape))
        return (
            self._along(stage, source, sent, shape, num_bytes)
            + (crossing.message_seconds(moved) + self.wait_s)
            + self._along(to_stage, received, target, shape, num_bytes)
        )

    def _along(
        self, stage: int, source: NdSbp, target: NdSbp, shape: Shape, num_bytes: int
    ) -> float:
        grid, links = self.strategy.placements[stage].shape, self.links[stage]
        return sum(
            start_seconds(step, links[step.axis])
            + step_seconds(step, state, grid, shape, num_bytes, links[step.axis])
            + self.wait_s * step.moves
            for step, state in states(source, target, grid, shape)
        )


def _read(op: Op, row: AxisSignatures) -> list[NdSbp]:
    """Return the nd-SBP of what each input's reader sees: of what goes around, all."""
    return [
        tuple(B if k in axis.turned else axis.inputs[k] for axis in row)
        for k in range(len(op.inputs))
    ]
