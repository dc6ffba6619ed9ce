"""The verdict on a table of signatures, by what holds on simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence

from flowrun.engine.ir.sbp import B, Sbp
from flowrun.engine.ops.signature import Signature
from flowrun.engine.proof.judge import holding_rows, on_one_axis
from flowrun.engine.proof.simulated_ranks import OpSample, row_holds


def wrong_rows(given: OpSample, listed: Sequence[Signature], parts: int) -> list[Signature]:
    """Return rows that are `listed` for the sample `given` and do not hold on `parts` ranks."""
    return [row for row in listed if not row_holds(given, on_one_axis(row), (parts,))]


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
