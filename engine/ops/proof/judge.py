"""The layouts of an op's output on one axis: SBPs under which the ranks' pieces are the whole.

P(max), P(min) and P(logsumexp) are tried for outputs alone: a P(max) is boxed to B where it is made
(Expands, ir/op_info.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flowrun.engine.ir.sbp import P_LOGSUMEXP, P_MAX, P_MIN, B, P, Partial, Sbp, Split
from flowrun.engine.ops.proof.simulated_ranks import Pieces, alike, put_together

OTHER_PARTIALS: tuple[Partial, ...] = (P_MAX, P_MIN, P_LOGSUMEXP)


def layouts_of(
    value: torch.Tensor | None, pieces: list[Any], parts: int, among: Sequence[Sbp] | None = None
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


def splits_of(value: torch.Tensor, parts: int) -> list[Split]:
    """Return the splits of a tensor's dims of at least `parts` elements."""
    return [Split(d) for d, size in enumerate(value.shape) if size >= parts]


def _sbps_of(value: torch.Tensor, parts: int) -> list[Sbp]:
    return [B, *([] if value.dtype == torch.bool else [P]), *splits_of(value, parts)]
