"""region_program: the ops of a region -> what one rank runs for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.actors.sums import as_they_come, sums_of, taken_over
from flowrun.engine.ir.graph import Op, Ref, map_refs
from flowrun.engine.ir.placement import Shape, Slices, local_slices
from flowrun.engine.lowering.tile import rows_on_a_rank
from flowrun.engine.ops import registry
from flowrun.engine.ops.ranges import CHECK
from flowrun.engine.ops.rowwise import on_matrix
from flowrun.engine.ops.signature import LocalCall, LocalView
from flowrun.engine.ops.traits import Trait, has, is_view, makes_list
from flowrun.engine.ops.update import accumulate
from flowrun.engine.runtime.kernels.out_variants import can_write
from flowrun.engine.runtime.kernels.program import Program, ProgramCall, Tile, TileOutput
from flowrun.engine.runtime.transport.transport import local_step


def region_program(
    plan: Plan, work: RegionWork, stage: int, coordinate: tuple[int, ...]
) -> Program:
    """reads, then the sums so far (sums_of; None with the first micro-batch) -> makes, then the new
    values of `updates`; for the rank at a coordinate of a stage.
    """
    return region_lines(plan, work, stage, coordinate)[0]


def region_lines(
    plan: Plan, work: RegionWork, stage: int, coordinate: tuple[int, ...]
) -> tuple[Program, tuple[tuple[Op, ...], ...]]:
    """The program, and the ops that each of its lines runs."""
    rank = _RankRegion(plan, plan.placements[stage].shape, coordinate)
    sums = sums_of(plan, work)
    writer = _Writer(rank, work, (*work.reads, *map(_before, sums)), sums)
    ops: list[tuple[Op, ...]] = []
    for run, is_tile in work.runs:
        if is_tile:
            writer.tile(run)
        else:
            writer.op(run[0])
        if len(writer.lines) > len(ops):  # an op that hands its input on has none
            ops.append(tuple(run))
    return writer.program((*work.makes, *(new for _, new in work.updates))), tuple(ops)


class _Writer:
    """The lines so far, and the number of every tensor."""

    def __init__(
        self, rank: _RankRegion, work: RegionWork, reads: Sequence[str], sums: Sequence[str] = ()
    ) -> None:
        self.rank = rank
        self.work = work
        self.sums = sums
        self.reads = self.count = len(reads)
        self.numbers = {name: k for k, name in enumerate(reads)}
        self.before = {new: old for old, new in work.updates}
        self.over = dict(work.overwrites)
        self.loose = as_they_come(rank.plan, work)
        self.own = taken_over(rank.plan, work)
        self.lines: list[ProgramCall] = []

    def program(self, results: Iterable[str]) -> Program:
        """What was written."""
        return Program(self.reads, tuple(self.lines), tuple(self.numbers[n] for n in results))

    def op(self, op: Op) -> None:
        """A line, or none if the op hands its input on."""
        call = self._added(op) if op.makes and op.makes[0] in self.sums else self.rank.call(op)
        if call is None:
            self.numbers[op.makes[0]] = self.numbers[op.inputs[0]]
            return
        if op.target == CHECK:  # readers read what it looks at: they wait for nothing more
            self.numbers[op.makes[0]] = self.numbers[op.inputs[0]]
            self._line(replace(op, outputs=(None,)), call, None)
            return
        into = None
        if op.makes and op.makes[0] in self.over and can_write(call.function):
            into = self.numbers[self.over[op.makes[0]]]
        self._line(op, call, into)

    def _added(self, op: Op) -> LocalCall:
        """This micro-batch's addend, onto those before."""
        (total,), own = op.makes, op.makes[0] in self.own
        return LocalCall(accumulate, (*op.args, Ref(_before(total))), (("own", own),))

    def tile(self, ops: Sequence[Op]) -> None:
        """One line for all of them."""
        inside = {name for op in ops for name in op.makes}
        reads = tuple(dict.fromkeys(n for op in ops for n in op.inputs if n not in inside))
        shown = self.work.shown(ops)
        whole = _Writer(self.rank, self.work, reads)
        rows = _Writer(self.rank, self.work, (*reads, *map(_rows_of, shown)))
        cut: set[str] = set()
        for op in ops:
            whole.op(op)
            found = rows_on_a_rank(self.rank.plan, op)
            assert found is not None, op  # tile.py took it
            cut |= found.cut
            rows.on_rows(op, shown)
        tile: Any = Tile(  # in the place of a function: kernels.py makes one of it
            whole.program(shown),
            rows.program(()),
            tuple(name in cut for name in reads),
            tuple(self._made(op, reads) for op in ops if op.makes[0] in shown),
        )
        args = tuple(Ref(str(self.numbers[name])) for name in reads)
        self.lines.append(
            ProgramCall(LocalCall(tile, args), tuple(map(self._new, shown)), single=False)
        )

    def on_rows(self, op: Op, shown: Collection[str]) -> None:
        """A line for some rows of a tile, or none for a view: matrices have one shape."""
        (made,) = op.makes
        call = self.rank.call(op)
        if call is None or is_view(op.target):
            self.numbers[made] = self.numbers[op.inputs[0]]
            return
        into = _rows_of(made) if made in shown else self.over.get(made)
        self._line(op, on_matrix(op, call), None if into is None else self.numbers[into])

    def _made(self, op: Op, reads: Sequence[str]) -> TileOutput:
        name = op.makes[0]
        over = reads.index(self.over[name]) if name in self.over else None
        return TileOutput(self.rank.shape(op), self.rank.plan.graph.tensors[name].dtype, over)

    def _line(self, op: Op, call: LocalCall, into: int | None) -> None:
        lookup = lambda ref: Ref(str(self.numbers[ref.name]))  # noqa: E731
        kwargs = tuple((k, map_refs(v, lookup)) for k, v in call.kwargs)
        call = LocalCall(call.function, map_refs(call.args, lookup), kwargs)
        made: list[int | None] = []
        changes: list[int] = []
        for name in op.outputs:
            if name is None:
                made.append(None)
            elif has(op.target, Trait.IN_PLACE):
                self.numbers[name] = self.numbers[self.before[name]]
                changes.append(self.numbers[name])
                made.append(None)
            else:
                made.append(self._new(name))
        single = len(op.outputs) == 1 and not makes_list(op.target)
        plain = has(op.target, Trait.PLAIN)
        loose = op.name in self.loose
        self.lines.append(
            ProgramCall(call, tuple(made), single, tuple(changes), plain, into, loose)
        )

    def _new(self, name: str) -> int:
        self.numbers[name] = self.count
        self.count += 1
        return self.numbers[name]


def _rows_of(name: str) -> str:
    """The rows of it that a tile fills."""
    return f"rows of {name}"


def _before(name: str) -> str:
    """The sum of the micro-batches before."""
    return f"{name} before"


# ---- a rank's call -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RankRegion:
    plan: Plan
    grid: tuple[int, ...]
    coordinate: tuple[int, ...]

    def call(self, op: Op) -> LocalCall | None:
        """What this rank runs in place of the op; None if it is the identity."""
        return _local(self.plan, op, self.grid, self.coordinate)

    def shape(self, op: Op) -> Shape:
        """What this rank has of an op's only output."""
        slices = _slices(self.plan, op.makes[0], op.out_sbp[0], self.grid, self.coordinate)
        return tuple(length for _, length in slices)


def _local(
    plan: Plan, op: Op, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> LocalCall | None:
    """What this rank runs in place of the op; None if it is the identity."""
    tensors = plan.graph.tensors
    if has(op.target, Trait.IDENTITY) or op.target == "flow.accumulate":
        return None
    if op.target == "flow.box":
        (name,) = op.inputs
        return LocalCall(_boxing(op, tensors[name].shape, grid, coordinate), (Ref(name),))
    if op.target == "aten.full.default":
        slices = _slices(plan, op.outputs[0] or "", op.out_sbp[0], grid, coordinate)
        return LocalCall(torch.full, (tuple(n for _, n in slices), op.args[1]), op.kwargs)
    view = LocalView(
        op,
        tuple(tensors[n].shape for n in op.inputs),
        tuple(None if n is None else tensors[n].shape for n in op.outputs),
        tuple(
            _slices(plan, n, nd, grid, coordinate)
            for n, nd in zip(op.inputs, op.in_sbp, strict=True)
        ),
        tuple(
            None if n is None else _slices(plan, n, nd, grid, coordinate)
            for n, nd in zip(op.outputs, op.out_sbp, strict=True)
        ),
    )
    return registry.localize(view)


def _boxing(
    op: Op, shape: Shape, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> Callable[..., Any]:
    """The local step of a boxing op as a function of one tensor (FX prints constants, and a Step is
    none).
    """
    step, nd_sbp = op.args[1], op.in_sbp[0]

    def box(tensor: torch.Tensor) -> torch.Tensor:
        return local_step(step, tensor, shape, nd_sbp, grid, coordinate)

    return box


def _slices(
    plan: Plan, name: str, nd_sbp: Any, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> Slices:
    return local_slices(plan.graph.tensors[name].shape, nd_sbp, grid, coordinate)
