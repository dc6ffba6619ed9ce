"""Ops that passes put into a graph and that compute nothing: boxings, crossings, pins, mirrors.

flow.box(tensor, step)          one step of a boxing (passes/insert_boxing.py)
flow.transfer(tensor, stage)    a tensor on another stage
flow.pin(tensor)                its layout is the recipe's (passes/layout/apply_pins.py)
flow.to_device, flow.to_host    a copy in the other memory of a rank (passes/update/place_states.py)

flow.own, flow.share and flow.by_rank lead in and out of the mirrored view (mirrored_view.py): no
row of theirs holds as a function of a logical tensor; what the ranks hold is read otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import LocalCall, LocalView, Signature

BOX, TRANSFER, PIN = "flow.box", "flow.transfer", "flow.pin"
TO_DEVICE, TO_HOST = "flow.to_device", "flow.to_host"
OWN, SHARE, BY_RANK = "flow.own", "flow.share", "flow.by_rank"
_IDENTITY = (Trait.IDENTITY, Trait.ALIASES)


def _own_entry(view: LocalView) -> LocalCall:
    """This rank's entry of the list."""
    return LocalCall(torch.ops.aten.reshape.default, (*view.op.args, (1,)))


OPS: Mapping[str, OpInfo] = {
    BOX: OpInfo(),
    TRANSFER: OpInfo(),
    TO_DEVICE: OpInfo(),
    TO_HOST: OpInfo(),
    PIN: OpInfo(traits=_IDENTITY),
    OWN: OpInfo(relabels=Signature((S(0),), (B,)), traits=_IDENTITY),
    SHARE: OpInfo(relabels=Signature((B,), (P,)), traits=_IDENTITY),
    BY_RANK: OpInfo(relabels=Signature((B,), (S(0),)), local=_own_entry),
}
