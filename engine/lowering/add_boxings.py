"""add_boxings: the actors that communicate.

Boxings that start at the same actor, of one kind, rate and dtype, share one message (a bucket), of
any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrun.engine.actors.plan import (
    BOX,
    COPY,
    RECEIVE,
    SEND,
    Actor,
    BoxWork,
    CopyWork,
    Plan,
    TensorMove,
    TransferWork,
)
from flowrun.engine.boxing.boxing import BoxingStep, exchange_if_small
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.location import Location
from flowrun.engine.lowering.add_regions import is_communication
from flowrun.engine.lowering.lower import set_actors
from flowrun.engine.ops.flow import structure
from flowrun.engine.ops.flow.structure import TO_DEVICE, TO_HOST, TRANSFER
from flowrun.engine.strategy import Strategy

Bucket = tuple[object, ...]  # what ops of one message have in common


def add_boxings(plan: Plan, strategy: Strategy) -> Plan:
    """Add an actor for each collective, and two for each message between stages (a pass)."""
    boxings: list[Actor] = []
    for channel, ops in enumerate(_buckets(plan).values()):
        match ops[0].target:
            case structure.TRANSFER:
                boxings += _transfer(plan, ops, channel)
            case structure.BOX:
                boxings.append(_collective(plan, strategy, ops))
            case _:
                boxings.append(_copy(plan, ops))
    return set_actors(plan, (*plan.actors, *boxings))


def _buckets(plan: Plan) -> dict[Bucket, list[Op]]:
    """Group the ops that share a message, in order of the first of each."""
    buckets: dict[Bucket, list[Op]] = {}
    maker = {name: actor.id for actor in plan.actors for name in actor.makes}
    start: dict[str, object] = dict(maker)  # tensor -> the actor, or the bucket, that it comes from
    for v in plan.variables.values():
        # variables that one region updates travel together; constants by themselves
        start[v.tensor] = ("constant", v.tensor) if v.new is None else maker.get(v.new, v.new)
    for op in (op for op in plan.graph.ops if is_communication(op)):
        (source,) = op.inputs
        key: Bucket = (start[source], op.stage, op.phase, op.chunk)
        if op.target == TRANSFER:
            key = ("transfer", op.args[1], *key)
        elif op.target == TO_DEVICE:  # what one region reads
            reader = plan.graph.consumers[op.makes[0]][0].makes[0]
            key = (TO_DEVICE, op.stage, maker.get(reader, reader))
        elif op.target == TO_HOST:
            key = (TO_HOST, *key)
        else:
            step, dtype = op.args[1], plan.tensors[source].dtype
            key = ("box", step.axis, step.kind, step.reduce, dtype, *key)
        buckets.setdefault(key, []).append(op)
        start[op.makes[0]] = key
    return buckets


def _transfer(plan: Plan, ops: Sequence[Op], channel: int) -> Iterator[Actor]:
    """Make the two ends of a message from one stage to another."""
    first, source = ops[0], ops[0].args[1]
    work = TransferWork(channel, source, first.stage, _moves(plan, ops))
    title = f"{first.module or 'step'}.{source}to{first.stage}.{first.phase}"
    for kind, stage in ((SEND, source), (RECEIVE, first.stage)):
        yield Actor(
            0, f"{kind}.{title}", kind, stage, phase=first.phase, per_step=first.per_step, work=work
        )


def _collective(plan: Plan, strategy: Strategy, ops: Sequence[Op]) -> Actor:
    """Make a collective of one message.  Whether it is an exchange is decided by the bytes of the
    rank with the largest shards, for all ranks have to do alike.
    """
    first, moves = ops[0], _moves(plan, ops)
    steps: list[BoxingStep] = [op.args[1] for op in ops]
    link = strategy.hardware.links(strategy.placements[first.stage])[steps[0].axis]
    num_bytes = sum(plan.tensor_bytes(move.read) for move in moves)
    work = BoxWork(tuple(exchange_if_small(step, num_bytes, link) for step in steps), moves)
    axis = strategy.axes[work.step.axis]
    title = f"{work.step.kind}.{axis}.{first.module or 'step'}.{first.phase}"
    return Actor(0, title, BOX, first.stage, phase=first.phase, per_step=first.per_step, work=work)


def _copy(plan: Plan, ops: Sequence[Op]) -> Actor:
    """Make a copy of tensors from one memory of a rank to the other."""
    first = ops[0]
    copies = tuple((op.inputs[0], op.makes[0]) for op in ops)
    old_of = {v.new: tensor for tensor, v in plan.variables.items()}
    updates = tuple((old_of[made], made) for _, made in copies if made in old_of)
    title = f"{first.target.removeprefix('flow.')}.{first.module or 'step'}"
    work = CopyWork(copies, updates)
    return Actor(0, title, COPY, first.stage, phase=first.phase, per_step=first.per_step, work=work)


def _moves(plan: Plan, ops: Sequence[Op]) -> tuple[TensorMove, ...]:
    return tuple(
        TensorMove(
            read=op.inputs[0],
            made=op.makes[0],
            shape=plan.tensors[op.inputs[0]].shape,
            dtype=plan.tensors[op.inputs[0]].dtype,
            source=Location(op.args[1] if op.target == TRANSFER else op.stage, op.in_sbp[0]),
            target=Location(op.stage, op.out_sbp[0]),
        )
        for op in ops
    )
