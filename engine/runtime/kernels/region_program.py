"""region_program: the ops of a region -> the program that one rank runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.actors.sums import find_reused_addends, find_unordered_results, sums_of
from flowrun.engine.ir.graph import Op, Ref, map_refs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.ir.sbp import NdSbp, is_elsewhere
from flowrun.engine.ir.signature import Function, LocalCall, LocalView
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow.ranges import CHECK
from flowrun.engine.ops.flow.structure import BOX
from flowrun.engine.ops.flow.update import ACCUMULATE, accumulate
from flowrun.engine.ops.shapes.create import FULL
from flowrun.engine.ops.traits import has, makes_list
from flowrun.engine.runtime.kernels.out_variants import can_write
from flowrun.engine.runtime.kernels.program import Program, ProgramCall
from flowrun.engine.runtime.transport.transport import local_step


def regions_of(plan: Plan, rank: int) -> Iterator[tuple[int, RegionWork]]:
    """Yield the regions of a rank, by actor."""
    for actor in plan.stage_actors(plan.stage_of(rank)):
        if isinstance(actor.work, RegionWork):
            yield actor.id, actor.work


def local_shape(plan: Plan, rank: int, name: str) -> Shape:
    """Return the shape of what a rank holds of a tensor that enters or leaves a region."""
    placement, nd_sbp = plan.placements[plan.stage_of(rank)], plan.locations[name].nd_sbp
    slices = placement.slices(rank, plan.tensors[name].shape, nd_sbp)
    return tuple(length for _, length in slices)


def region_program(plan: Plan, work: RegionWork, rank: int) -> Program:
    """Return the program of a region for a rank.

    It takes `reads`, then the sums so far (sums_of; None in the first micro-batch), and returns
    `makes`, then the new values of `updates`.
    """
    return region_lines(plan, work, rank)[0]


def region_lines(plan: Plan, work: RegionWork, rank: int) -> tuple[Program, tuple[Op, ...]]:
    """Return the program, and the op that each of its lines runs."""
    writer = _Writer(plan, work, rank)
    ops: list[Op] = []
    for op in work.ops:
        writer.op(op)
        if len(writer.lines) > len(ops):  # an identity has no line
            ops.append(op)
    return writer.program((*work.makes, *(new for _, new in work.updates))), tuple(ops)


class _Writer:
    """The lines written so far, and the number of every tensor."""

    def __init__(self, plan: Plan, work: RegionWork, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.sums = sums_of(plan, work)
        reads = (*work.reads, *map(_before, self.sums))
        self.reads = self.count = len(reads)
        self.numbers = {name: k for k, name in enumerate(reads)}
        self.before = {new: old for old, new in work.updates}
        self.before |= {v.copies[1]: v.copies[0] for v in plan.variables.values() if v.copies}
        self.over = dict(work.overwrites)
        self.any_stride = find_unordered_results(plan, work)
        self.own = find_reused_addends(plan, work)
        self.lines: list[ProgramCall] = []
        self.leaving = frozenset(work.makes)
        self.coordinate = plan.placements[plan.stage_of(rank)].coordinate(rank)

    def program(self, results: Iterable[str]) -> Program:
        return Program(self.reads, tuple(self.lines), tuple(self.numbers[n] for n in results))

    def op(self, op: Op) -> None:
        """Append the line of an op; an identity has none, nor one that another rank owns."""
        if any(is_elsewhere(nd_sbp, self.coordinate) for nd_sbp in op.out_sbp):
            self._stand_in(op)
            return
        summed = op.makes and op.makes[0] in self.sums
        call = self._accumulate(op) if summed else _localize(self.plan, op, self.rank)
        if call is None:
            self.numbers[op.makes[0]] = self.numbers[op.inputs[0]]
            return
        if op.target == CHECK:  # readers read its input
            self.numbers[op.makes[0]] = self.numbers[op.inputs[0]]
            self._line(replace(op, outputs=(None,)), call, None)
            return
        into = None
        if op.makes and op.makes[0] in self.over and can_write(call.function):
            into = self.numbers[self.over[op.makes[0]]]
        self._line(op, call, into)

    def _stand_in(self, op: Op) -> None:
        """Append what stands for tensors of others where they leave the region: nothing."""
        for name in self.leaving.intersection(op.makes):
            shape = local_shape(self.plan, self.rank, name)
            call = LocalCall(torch.zeros, (shape,), (("dtype", self.plan.tensors[name].dtype),))
            self._line(replace(op, outputs=(name,)), call, None)

    def _accumulate(self, op: Op) -> LocalCall:
        """Return the call that adds to the sum over earlier micro-batches."""
        (total,), own = op.makes, op.makes[0] in self.own
        return LocalCall(accumulate, (*op.args, Ref(_before(total))), (("own", own),))

    def _line(self, op: Op, call: LocalCall, into: int | None) -> None:
        lookup = lambda ref: Ref(str(self.numbers[ref.name]))  # noqa: E731
        kwargs = tuple((k, map_refs(v, lookup)) for k, v in call.kwargs)
        call = LocalCall(call.function, map_refs(call.args, lookup), kwargs)
        outputs: list[int | None] = []
        changes: list[int] = []
        for name in op.outputs:
            if name is None:
                outputs.append(None)
            elif has(op.target, Trait.IN_PLACE):
                self.numbers[name] = self.numbers[self.before[name]]
                changes.append(self.numbers[name])
                outputs.append(None)
            else:
                outputs.append(self._new(name))
        single = len(op.outputs) == 1 and not makes_list(op.target)
        plain = has(op.target, Trait.PLAIN)
        any_stride = op.name in self.any_stride
        self.lines.append(
            ProgramCall(
                call,
                tuple(outputs),
                single,
                tuple(changes),
                plain=plain,
                into=into,
                any_stride=any_stride,
            )
        )

    def _new(self, name: str) -> int:
        self.numbers[name] = self.count
        self.count += 1
        return self.numbers[name]


def _before(name: str) -> str:
    return f"{name} before"


def _localize(plan: Plan, op: Op, rank: int) -> LocalCall | None:
    """Return the call that this rank runs for the op; None if it is the identity."""
    tensors, placement = plan.tensors, plan.placements[op.stage]
    if has(op.target, Trait.IDENTITY) or op.target == ACCUMULATE:
        return None
    if op.target == BOX:
        (name,) = op.inputs
        at = placement.shape, placement.coordinate(rank)
        return LocalCall(_boxing(op, tensors[name].shape, *at), (Ref(name),))

    def slices(name: str, nd_sbp: NdSbp) -> Slices:
        return placement.slices(rank, tensors[name].shape, nd_sbp)

    if op.target == FULL:
        lengths = tuple(n for _, n in slices(op.outputs[0] or "", op.out_sbp[0]))
        return LocalCall(torch.full, (lengths, op.args[1]), op.kwargs)
    outs = list(zip(op.outputs, op.out_sbp, strict=True))
    view = LocalView(
        op=op,
        in_shapes=tuple(tensors[n].shape for n in op.inputs),
        out_shapes=tuple(None if n is None else tensors[n].shape for n, _ in outs),
        in_slices=tuple(map(slices, op.inputs, op.in_sbp)),
        out_slices=tuple(None if n is None else slices(n, nd) for n, nd in outs),
    )
    return registry.localize(view)


def _boxing(op: Op, shape: Shape, grid: tuple[int, ...], coordinate: tuple[int, ...]) -> Function:
    """Return the local step of a boxing op as a function of one tensor: FX prints arguments as
    constants, which a BoxingStep is not.
    """
    step, nd_sbp = op.args[1], op.in_sbp[0]

    def box(tensor: torch.Tensor) -> torch.Tensor:
        return local_step(step, tensor, shape, nd_sbp, grid, coordinate)

    return box
