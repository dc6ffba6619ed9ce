"""A plan made by hand whose registers suffice only if they hold a whole step.

Stage 0 makes something with every micro-batch and sums it up; stage 1 reads both what is made and,
with its first act, the sum of the whole step.  So stage 0 must be a whole step ahead.

    make ─▶ send ─▶ receive ─▶ use            registers 0, 1: every micro-batch
      └───▶ sum ─▶ send ─▶ receive ──┘        registers 2, 3, 4: once a step
"""

from __future__ import annotations

from flowrun.engine.actors.plan import (
    RECEIVE,
    REGION,
    SEND,
    Actor,
    Plan,
    RegionWork,
    Register,
    TransferWork,
)
from flowrun.engine.ir.graph import FORWARD, UPDATE, LogicalGraph
from flowrun.engine.ir.placement import Placement

MAKE, SEND_IT, RECEIVE_IT, USE, SUM, SEND_SUM, RECEIVE_SUM, WATCH = range(8)


def tight_plan(micro_batches: int, slots: int) -> Plan:
    """slots: of the registers of every micro-batch.  A watcher on rank 0 reads register 0, too."""
    work = RegionWork((), (), ())
    one, other = TransferWork(0, 0, 1, ()), TransferWork(1, 0, 1, ())
    actors = (
        Actor(MAKE, "make", REGION, 0, FORWARD, False, work, (), (0, 2), 1.0),
        Actor(SEND_IT, "send it", SEND, 0, FORWARD, False, one, (0,), (), 1.0),
        Actor(RECEIVE_IT, "receive it", RECEIVE, 1, FORWARD, False, one, (), (1,), 1.0),
        Actor(USE, "use", REGION, 1, FORWARD, False, work, (1, 4), (), 1.0),
        Actor(SUM, "sum", REGION, 0, UPDATE, True, work, (2,), (3,), 1.0),
        Actor(SEND_SUM, "send sum", SEND, 0, UPDATE, True, other, (3,), (), 1.0),
        Actor(RECEIVE_SUM, "receive sum", RECEIVE, 1, UPDATE, True, other, (), (4,), 1.0),
        Actor(WATCH, "watch", REGION, 0, FORWARD, False, work, (0,), (), 1.0),
    )
    registers = (
        Register(0, "make", 0, (), MAKE, (WATCH, SEND_IT), slots, False),
        Register(1, "receive it", 1, (), RECEIVE_IT, (USE,), slots, False),
        Register(2, "make", 0, (), MAKE, (SUM,), 1, True),
        Register(3, "sum", 0, (), SUM, (SEND_SUM,), 1, True),
        Register(4, "receive sum", 1, (), RECEIVE_SUM, (USE,), 1, True),
    )
    placements = (Placement((), (0,)), Placement((), (1,)))
    return Plan(placements, (), LogicalGraph((), {}), actors, registers, micro_batches)
