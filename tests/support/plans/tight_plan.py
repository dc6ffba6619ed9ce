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
    work = RegionWork(ops=(), reads=(), makes=())
    one, other = TransferWork(0, 0, 1, ()), TransferWork(1, 0, 1, ())
    actors = (
        Actor(
            MAKE,
            "make",
            REGION,
            0,
            phase=FORWARD,
            per_step=False,
            work=work,
            inputs=(),
            outputs=(0, 2),
            seconds=1.0,
        ),
        Actor(
            SEND_IT,
            "send it",
            SEND,
            0,
            phase=FORWARD,
            per_step=False,
            work=one,
            inputs=(0,),
            outputs=(),
            seconds=1.0,
        ),
        Actor(
            RECEIVE_IT,
            "receive it",
            RECEIVE,
            1,
            phase=FORWARD,
            per_step=False,
            work=one,
            inputs=(),
            outputs=(1,),
            seconds=1.0,
        ),
        Actor(
            USE,
            "use",
            REGION,
            1,
            phase=FORWARD,
            per_step=False,
            work=work,
            inputs=(1, 4),
            outputs=(),
            seconds=1.0,
        ),
        Actor(
            SUM,
            "sum",
            REGION,
            0,
            phase=UPDATE,
            per_step=True,
            work=work,
            inputs=(2,),
            outputs=(3,),
            seconds=1.0,
        ),
        Actor(
            SEND_SUM,
            "send sum",
            SEND,
            0,
            phase=UPDATE,
            per_step=True,
            work=other,
            inputs=(3,),
            outputs=(),
            seconds=1.0,
        ),
        Actor(
            RECEIVE_SUM,
            "receive sum",
            RECEIVE,
            1,
            phase=UPDATE,
            per_step=True,
            work=other,
            inputs=(),
            outputs=(4,),
            seconds=1.0,
        ),
        Actor(
            WATCH,
            "watch",
            REGION,
            0,
            phase=FORWARD,
            per_step=False,
            work=work,
            inputs=(0,),
            outputs=(),
            seconds=1.0,
        ),
    )
    registers = (
        Register(
            id=0,
            name="make",
            stage=0,
            tensors=(),
            producer=MAKE,
            readers=(WATCH, SEND_IT),
            slots=slots,
            per_step=False,
        ),
        Register(
            id=1,
            name="receive it",
            stage=1,
            tensors=(),
            producer=RECEIVE_IT,
            readers=(USE,),
            slots=slots,
            per_step=False,
        ),
        Register(
            id=2,
            name="make",
            stage=0,
            tensors=(),
            producer=MAKE,
            readers=(SUM,),
            slots=1,
            per_step=True,
        ),
        Register(
            id=3,
            name="sum",
            stage=0,
            tensors=(),
            producer=SUM,
            readers=(SEND_SUM,),
            slots=1,
            per_step=True,
        ),
        Register(
            id=4,
            name="receive sum",
            stage=1,
            tensors=(),
            producer=RECEIVE_SUM,
            readers=(USE,),
            slots=1,
            per_step=True,
        ),
    )
    placements = (Placement((), (0,)), Placement((), (1,)))
    return Plan(
        placements=placements,
        axes=(),
        graph=LogicalGraph((), {}),
        actors=actors,
        registers=registers,
        micro_batches=micro_batches,
    )
