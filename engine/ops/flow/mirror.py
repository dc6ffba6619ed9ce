"""Ops that lead in and out of the mirrored view (passes/mirrored_view.py).

No row of theirs holds as a function of a logical tensor: they say how what the ranks hold is to be
read from there on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import LocalCall, LocalView, Signature

OWN, SHARE, BY_RANK = "flow.own", "flow.share", "flow.by_rank"
_IDENTITY = (Trait.IDENTITY, Trait.ALIASES)


def local_by_rank(view: LocalView) -> LocalCall:
    """This rank's entry of the list."""
    return LocalCall(_entry, view.op.args)


def _entry(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1)


OPS: Mapping[str, OpInfo] = {
    OWN: OpInfo(relabels=Signature((S(0),), (B,)), traits=_IDENTITY),
    SHARE: OpInfo(relabels=Signature((B,), (P,)), traits=_IDENTITY),
    BY_RANK: OpInfo(relabels=Signature((B,), (S(0),)), local=local_by_rank),
}
