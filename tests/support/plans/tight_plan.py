"""A plan made by hand whose registers suffice only if they hold a whole step.

Stage 0 makes something with every micro-batch and sums it up; stage 1 reads both what is made and,
with its first act, the sum of the whole step.  So stage 0 must be a whole step ahead.

    make ─▶ send ─▶ receive ─▶ use            registers 0, 1: every micro-batch
      └───▶ sum ─▶ send ─▶ receive ──┘        registers 2, 3, 4: once a step
"""

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
    rows = (  # in the order of their numbers; inputs, outputs
        ("make", REGION, 0, FORWARD, work, (), (0, 2)),
        ("send it", SEND, 0, FORWARD, one, (0,), ()),
        ("receive it", RECEIVE, 1, FORWARD, one, (), (1,)),
        ("use", REGION, 1, FORWARD, work, (1, 4), ()),
        ("sum", REGION, 0, UPDATE, work, (2,), (3,)),
        ("send sum", SEND, 0, UPDATE, other, (3,), ()),
        ("receive sum", RECEIVE, 1, UPDATE, other, (), (4,)),
        ("watch", REGION, 0, FORWARD, work, (0,), ()),
    )
    actors = tuple(
        Actor(
            *(k, name, kind, stage),
            phase=phase,
            per_step=phase == UPDATE,
            work=done,
            inputs=inputs,
            outputs=outputs,
            seconds=1.0,
        )
        for k, (name, kind, stage, phase, done, inputs, outputs) in enumerate(rows)
    )
    registers = tuple(
        Register(
            id=k,
            name=actors[producer].name,
            stage=actors[producer].stage,
            tensors=(),
            producer=producer,
            readers=readers,
            slots=1 if k > 1 else slots,
            per_step=k > 1,
        )
        for k, (producer, readers) in enumerate(
            (
                (MAKE, (WATCH, SEND_IT)),
                (RECEIVE_IT, (USE,)),
                (MAKE, (SUM,)),
                (SUM, (SEND_SUM,)),
                (RECEIVE_SUM, (USE,)),
            )
        )
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
