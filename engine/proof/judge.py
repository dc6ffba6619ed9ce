"""The judge of a signature table on one axis: which rows hold, tried over every SBP there is.

P(max), P(min) and P(logsumexp) are tried for outputs alone: a P(max) is boxed to B where it is made
(Expands, ops/op_info.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import P_LOGSUMEXP, P_MAX, P_MIN, B, P, Partial, Sbp, Split
from flowrun.engine.ops import registry
from flowrun.engine.ops.signature import LocalCall, NdSignature, Signature
from flowrun.engine.proof.simulated_ranks import (
    FAILURES,
    OpSample,
    Pieces,
    alike,
    lay_out,
    local_view,
    piece_shape,
    put_together,
    run,
)

OTHER_PARTIALS: tuple[Partial, ...] = (P_MAX, P_MIN, P_LOGSUMEXP)


def holding_rows(given: OpSample, parts: int) -> Iterator[Signature]:
    """All rows that hold on one axis, over every SBP of every input and output.

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

    Integers and masks are never partial: they are positions and conditions.
    """
    return [B, *([P] if value.dtype.is_floating_point else []), *_splits(value, parts)]


def _splits(value: torch.Tensor, parts: int) -> list[Split]:
    return [Split(d) for d, size in enumerate(value.shape) if size >= parts]


def _programs(
    given: OpSample, ins: tuple[Sbp, ...], parts: int
) -> dict[tuple[LocalCall, ...], list[tuple[Sbp | None, ...]]]:
    """Return each program of the ranks -> the cuts of the outputs for which they run it.

    Only a local program looks at the cut; None: any.
    """
    op, looks = given.op, registry.info(given.op.target).local is not None
    cuts: list[list[Sbp]] = [
        [B, *(_splits(v, parts) if v is not None and looks else ())] for v in given.made
    ]
    found: dict[tuple[LocalCall, ...], list[tuple[Sbp | None, ...]]] = {}
    tensors = given.tensors
    for outs in itertools.product(*cuts):
        nd = on_one_axis(Signature(ins, outs))
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
    cut = _splits(value, parts)
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


def layouts_of(
    value: torch.Tensor | None,
    pieces: list[Any],
    parts: int,
    among: Sequence[Sbp] | None = None,
) -> list[Sbp]:
    """Return SBPs under which the pieces of `parts` ranks are the whole value; B alone for an
    output that is not made.

    among: those to be looked at; None: all there are.
    """
    if value is None:
        return [B]
    held: Pieces = {(k,): piece for k, piece in enumerate(pieces)}
    shape = tuple(value.shape)
    fits: list[Sbp] = []
    for sbp in (*_sbps_of(value, parts), *OTHER_PARTIALS) if among is None else among:
        if sbp in OTHER_PARTIALS and (fits or not value.dtype.is_floating_point):
            continue
        whole = put_together(held, (sbp,), (parts,), shape)
        if whole is not None and alike(whole.to(value.dtype), value):
            fits.append(sbp)
    return fits


def _sbps_of(value: torch.Tensor, parts: int) -> list[Sbp]:
    return [B, *([] if value.dtype == torch.bool else [P]), *_splits(value, parts)]


def on_one_axis(row: Signature) -> NdSignature:
    """The row as one for a grid of one axis."""
    return NdSignature(tuple((sbp,) for sbp in row.inputs), tuple((sbp,) for sbp in row.outputs))
