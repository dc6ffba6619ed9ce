"""Ops that lead in and out of the mirrored view (passes/mirrored_view.py).

No row of theirs holds as a function of a logical tensor: they say how what the ranks hold is to be
read from there on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ops.signature import Local, LocalCall, LocalView, Signature

RELABELS: Mapping[str, Signature] = {
    "flow.own": Signature((S(0),), (B,)),
    "flow.share": Signature((B,), (P,)),
    "flow.by_rank": Signature((B,), (S(0),)),
}


def local_by_rank(view: LocalView) -> LocalCall:
    """This rank's entry of the list."""
    return LocalCall(_entry, view.op.args)


def _entry(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1)


LOCALS: Mapping[str, Local] = {"flow.by_rank": local_by_rank}
