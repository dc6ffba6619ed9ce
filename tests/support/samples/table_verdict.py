"""The verdict on a table of signatures, by what holds on simulated ranks."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, Sbp, Split
from flowrun.engine.ir.signature import LocalCall, NdSignature, Signature
from flowrun.engine.ops import registry
from flowrun.engine.ops.proof.simulated_ranks import (
    FAILURES,
    Grid,
    OpSample,
    lay_out,
    layouts_of,
    local_view,
    piece_shape,
    row_failure,
    run,
    splits_of,
)


def row_holds(given: OpSample, row: NdSignature, grid: Grid) -> bool:
    """Return whether the row makes what the op of the sample makes whole, on this grid."""
    return not row_failure(given, row, grid)


def nd_rows(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None], grid: Grid
) -> list[NdSignature]:
    """Return the rows of an op on all axes of a grid."""

    def on(axis: int, ins: Sequence[Shape], outs: Sequence[Shape | None]) -> tuple[Signature, ...]:
        return registry.signatures(op, ins, outs, grid[axis])

    return list(map(NdSignature.of, registry.lift(on, in_shapes, out_shapes, grid)))


def wrong_rows(given: OpSample, listed: Sequence[Signature], parts: int) -> list[Signature]:
    """Return rows that are `listed` for the sample `given` and do not hold on `parts` ranks."""
    return [row for row in listed if not row_holds(given, NdSignature.of([row]), (parts,))]


def missing_rows(given: OpSample, listed: Sequence[Signature], parts: int) -> list[Signature]:
    """Return rows that hold for the sample `given` on `parts` ranks and are not `listed`; an output
    that is not made has no SBP to compare.
    """
    unmade = [j for j, value in enumerate(given.made) if value is None]
    known = {(row.inputs, _blank(row.outputs, unmade)) for row in listed}
    return [
        row
        for row in dict.fromkeys(holding_rows(given, parts))
        if (row.inputs, _blank(row.outputs, unmade)) not in known
    ]


def _blank(outputs: tuple[Sbp, ...], unmade: Sequence[int]) -> tuple[Sbp, ...]:
    return tuple(B if j in unmade else sbp for j, sbp in enumerate(outputs))


# ---- rows that hold -----------------------------------------------------------------------------


def holding_rows(given: OpSample, parts: int) -> Iterator[Signature]:
    """Yield all rows that hold on one axis, over every SBP of every input and output.

    A maximum of equal copies, or of one owner's value and zeros, is a trivial P(max): P(max) and
    P(min) count only where neither B nor P holds.
    """
    choices = [_choices(value, parts) for value in given.inputs]
    laid = {
        (k, sbp): lay_out(value, (sbp,), (parts,))
        for k, value in enumerate(given.inputs)
        for sbp in choices[k]
    }
    for ins in itertools.product(*choices):
        pieces = [laid[k, sbp] for k, sbp in enumerate(ins)]
        here = [[piece[rank,] for piece in pieces] for rank in range(parts)]
        if not all(given.sound([tuple(t.shape) for t in tensors]) for tensors in here):
            continue
        for calls, layouts in _programs(given, ins, parts).items():
            made = _made_by(given.op, calls, here, [_shapes(v, parts) for v in given.made])
            if made is None:
                continue
            fitting = [
                layouts_of(given.made[j], [rank[j] for rank in made], parts)
                for j in range(len(given.made))
            ]
            for outs in itertools.product(*fitting):
                if any(_cut_alike(outs, layout) for layout in layouts):
                    yield Signature(ins, outs)


def _choices(value: torch.Tensor, parts: int) -> list[Sbp]:
    """SBPs that an input can have.

    Integers and masks are never partial: they are positions and conditions.  Nor are 8 bits.
    """
    sums = value.dtype.is_floating_point and value.dtype.itemsize > 1
    return [B, *([P] if sums else []), *splits_of(value, parts)]


def _programs(
    given: OpSample, ins: tuple[Sbp, ...], parts: int
) -> dict[tuple[LocalCall, ...], list[tuple[Sbp | None, ...]]]:
    """Return each program of the ranks -> the cuts of the outputs for which they run it.

    Only a local program looks at the cut; None: any.
    """
    op, looks = given.op, registry.info(given.op.target).local is not None
    cuts: list[list[Sbp]] = [
        [B, *(splits_of(v, parts) if v is not None and looks else ())] for v in given.made
    ]
    found: dict[tuple[LocalCall, ...], list[tuple[Sbp | None, ...]]] = {}
    tensors = given.tensors
    for outs in itertools.product(*cuts):
        nd = NdSignature.of([Signature(ins, outs)])
        signed = replace(op, in_sbp=nd.inputs, out_sbp=nd.outputs)
        try:
            calls = tuple(
                registry.localize(local_view(signed, tensors, (parts,), (k,))) for k in range(parts)
            )
        except FAILURES:
            continue
        found.setdefault(calls, []).append(outs if looks else (None,) * len(outs))
    return found


def _cut_alike(outs: tuple[Sbp, ...], layout: tuple[Sbp | None, ...]) -> bool:
    """True if the outputs are cut as the program assumed (None: it did not care)."""
    return all(
        cut is None or (out == cut if isinstance(out, Split) else cut == B)
        for out, cut in zip(outs, layout, strict=True)
    )


def _shapes(value: torch.Tensor | None, parts: int) -> list[set[Shape]] | None:
    """Return for each rank the shapes that its piece of an output can have."""
    if value is None:
        return None
    whole = tuple(value.shape)
    cut = splits_of(value, parts)
    return [{whole, *(piece_shape(whole, sbp, parts, k) for sbp in cut)} for k in range(parts)]


def _made_by(
    op: Op,
    calls: tuple[LocalCall, ...],
    here: list[list[torch.Tensor]],
    possible: list[list[set[Shape]] | None],
) -> list[tuple[torch.Tensor | None, ...]] | None:
    """Outputs of every rank; None as soon as one fails or makes what can be no piece."""
    made = []
    for rank, call in enumerate(calls):
        try:
            outputs = run(call, dict(zip(op.inputs, here[rank], strict=True)))
        except FAILURES:
            return None
        if len(outputs) != len(possible):
            return None
        for shapes, output in zip(possible, outputs, strict=True):
            if shapes is not None and (output is None or tuple(output.shape) not in shapes[rank]):
                return None
        made.append(outputs)
    return made
