"""Promises about nd-SBPs: they fit shapes, rows are legal; once boxed, layouts meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.graph import BOXED, LAID_OUT, UPDATE, Op
from flowrun.engine.ir.placement import Shape, left_over
from flowrun.engine.ir.sbp import B, NdSbp, Split, format_nd_sbp
from flowrun.engine.ir.signature import Signature, owned_rows
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow.check import AFTER
from flowrun.engine.ops.flow.structure import BOX, PIN, TO_DEVICE, TO_HOST, TRANSFER
from flowrun.engine.verify.rules import Fault, Rules, Subject

PASS_ON = (PIN, AFTER)  # their first input, in any layout; it waits for the others


def _find_missing_homes(subject: Subject) -> Iterator[Fault]:
    """Variables and fields have homes that their shapes allow."""
    for source in subject.graph.sources:
        if not _fits(subject, source.tensor, source.nd_sbp, source.stage):
            yield Fault(f"source {source.tensor}", _misfit(subject, source.tensor, source.nd_sbp))


def _find_missing_sbps(subject: Subject) -> Iterator[Fault]:
    """An op has an nd-SBP for each tensor that it reads or makes."""
    for op in _ops_with_sbps(subject):
        given, needed = (len(op.in_sbp), len(op.out_sbp)), (len(op.inputs), len(op.outputs))
        if given != needed:
            fact = f"it has {given[0]} + {given[1]} nd-SBPs for {needed[0]} + {needed[1]} tensors."
            yield Fault(op, fact)


def _find_misfits(subject: Subject) -> Iterator[Fault]:
    """An nd-SBP has an SBP an axis, and splits dims that are there."""
    for op in _ops_with_sbps(subject):
        for name, nd_sbp in _tensors(op):
            if not _fits(subject, name, nd_sbp, op.stage):
                yield Fault(op, _misfit(subject, name, nd_sbp))


def _find_illegal_rows(subject: Subject) -> Iterator[Fault]:
    """On each axis, an op has a row of its table."""
    for op in _ops_with_sbps(subject):
        if op.target in (BOX, TRANSFER, TO_DEVICE, TO_HOST):
            continue
        for axis, parts in enumerate(subject.grid(op.stage)):
            row = _row(op, axis)
            if parts > 1 and not _is_legal(subject, op, row, axis, parts):
                name = subject.strategy.axes[axis]
                yield Fault(op, f"its row on axis {name} is {row}.")


def _find_unlike_layouts(subject: Subject) -> Iterator[Fault]:
    """Stage and nd-SBP of a tensor are those that its readers read."""
    for op in subject.graph.ops:
        for name, wanted in zip(op.inputs, op.in_sbp, strict=True):
            stage, nd_sbp = subject.locations[name]
            reads = op.args[1] if op.target == TRANSFER else op.stage
            grid = subject.grid(stage)
            if stage != reads or _on_wide_axes(nd_sbp, grid) != _on_wide_axes(wanted, grid):
                fact = f"it reads %{name} as {_at(reads, wanted)}; that is {_at(stage, nd_sbp)}."
                yield Fault(op, fact)


def _find_wrong_steps(subject: Subject) -> Iterator[Fault]:
    """Flow.box changes the SBP of one axis as its step says."""
    for op in subject.graph.ops:
        if op.target != BOX:
            continue
        step: BoxingStep = op.args[1]
        (source,), (target,) = op.in_sbp, op.out_sbp
        if source[step.axis] != step.source or step.after(source) != target:
            change = f"{format_nd_sbp(source)} -> {format_nd_sbp(target)}"
            yield Fault(op, f"its step, {step}, does not change {change}.")


def _find_expansions(subject: Subject) -> Iterator[Fault]:
    """No op reduces over ranks inside: expansions are written out."""
    for op in subject.graph.ops:
        if registry.needs_expansion(op, subject.graph.tensors):
            yield Fault(op, "its signature stands for ordinary ops and boxings.")


def _find_partial_results(subject: Subject) -> Iterator[Fault]:
    """Results are whole on each rank that reports them."""
    for name, tensor in subject.graph.results:
        stage, nd_sbp = subject.locations[tensor]
        if any(sbp != B for sbp in _on_wide_axes(nd_sbp, subject.grid(stage))):
            yield Fault(f"result {name}", f"%{tensor} is {_at(stage, nd_sbp)}.")


def _find_moving_variables(subject: Subject) -> Iterator[Fault]:
    """The new value of a variable is made where it lives."""
    for v in subject.graph.variables:
        if v.new is None:
            continue
        stage, nd_sbp = subject.locations[v.new]
        grid = subject.grid(v.stage)
        if stage != v.stage or _on_wide_axes(nd_sbp, grid) != _on_wide_axes(v.nd_sbp, grid):
            fact = f"it lives as {_at(v.stage, v.nd_sbp)}, its new value is {_at(stage, nd_sbp)}."
            yield Fault(f"variable {v.name}", fact)


LAYOUT_RULES: Rules[Subject] = {
    LAID_OUT: (_find_missing_homes, _find_missing_sbps, _find_misfits, _find_illegal_rows),
    BOXED: (
        _find_unlike_layouts,
        _find_wrong_steps,
        _find_expansions,
        _find_partial_results,
        _find_moving_variables,
    ),
}


def _ops_with_sbps(subject: Subject) -> Iterator[Op]:
    """Ops of the update have their signatures from level signed on."""
    early = subject.graph.level == LAID_OUT
    return (op for op in subject.graph.ops if not (early and op.phase == UPDATE))


def _tensors(op: Op) -> Iterator[tuple[str, NdSbp]]:
    yield from zip(op.inputs, op.in_sbp, strict=True)
    yield from ((n, nd) for n, nd in zip(op.outputs, op.out_sbp, strict=True) if n is not None)


def _row(op: Op, axis: int) -> Signature:
    return Signature(tuple(nd[axis] for nd in op.in_sbp), tuple(nd[axis] for nd in op.out_sbp))


def _is_legal(subject: Subject, op: Op, row: Signature, axis: int, parts: int) -> bool:
    """True if the op may have this row on an axis, given those of the axes before."""
    if op.target in PASS_ON:
        return row.outputs == row.inputs[:1]
    if relabelled := registry.info(op.target).relabels:
        return row == relabelled
    grid, tensors = subject.grid(op.stage), subject.graph.tensors

    def left(name: str, nd_sbp: NdSbp) -> Shape:
        return left_over(tensors[name].shape, nd_sbp[:axis], grid)

    in_shapes = [left(name, nd) for name, nd in zip(op.inputs, op.in_sbp, strict=True)]
    out_shapes = [
        None if name is None else left(name, nd)
        for name, nd in zip(op.outputs, op.out_sbp, strict=True)
    ]
    legal = registry.signatures(op, in_shapes, out_shapes, parts)
    if op.owner is not None:
        placement = subject.strategy.placements[op.stage]
        owner = placement.coordinate(placement.ranks[op.owner])[axis]
        legal = (*legal, *owned_rows(op, owner, in_shapes))
    return any((each.inputs, each.outputs) == (row.inputs, row.outputs) for each in legal)


def _fits(subject: Subject, name: str, nd_sbp: NdSbp, stage: int) -> bool:
    """True if there is an SBP an axis, and every split dim has an element for each rank."""
    grid = subject.grid(stage)
    if len(nd_sbp) != len(grid):
        return False
    left = list(subject.graph.tensors[name].shape)
    for sbp, parts in zip(nd_sbp, grid, strict=True):
        if isinstance(sbp, Split) and parts > 1:
            if sbp.dim >= len(left) or left[sbp.dim] < parts:
                return False
            left[sbp.dim] = -(-left[sbp.dim] // parts)
    return True


def _misfit(subject: Subject, name: str, nd_sbp: NdSbp) -> str:
    axes = ", ".join(subject.strategy.axes)
    return f"{subject.graph.tensors[name]} is {format_nd_sbp(nd_sbp)} on axes ({axes})."


def _on_wide_axes(nd_sbp: NdSbp, grid: Sequence[int]) -> NdSbp:
    """Drop the axes of one rank, on which all SBPs are the same."""
    return tuple(sbp for sbp, parts in zip(nd_sbp, grid, strict=True) if parts > 1)


def _at(stage: int, nd_sbp: NdSbp) -> str:
    return f"{format_nd_sbp(nd_sbp) if nd_sbp else 'whole'} on stage {stage}"
