"""Ops that passes put into a graph and that compute nothing: boxings, crossings, pins.

flow.box(tensor, step)          one step of a boxing (passes/insert_boxing.py)
flow.transfer(tensor, stage)    a tensor on another stage
flow.pin(tensor)                its layout is the recipe's (passes/layout/pin_activations.py)
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ir.op_info import OpInfo, Trait

BOX, TRANSFER, PIN = "flow.box", "flow.transfer", "flow.pin"

OPS: Mapping[str, OpInfo] = {
    BOX: OpInfo(),
    TRANSFER: OpInfo(),
    PIN: OpInfo(traits=(Trait.IDENTITY, Trait.ALIASES)),
}
