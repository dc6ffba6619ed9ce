"""Promises about registers: their ends exist; slots, rates and bytes are right; no deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from flowrun.engine.actors.plan import RECEIVE, REGISTERS, Plan, TransferWork
from flowrun.engine.verify.rules import Fault, Rules, name_of


def _find_broken_ends(plan: Plan) -> Iterator[Fault]:
    """Producer and readers of a register are actors of its stage."""
    count = len(plan.actors)
    for k, register in enumerate(plan.registers):
        if register.id != k:
            yield Fault(register, f"it is number {k} of the plan's registers.")
        ends = [*register.readers, *(() if register.producer is None else (register.producer,))]
        for end in ends:
            if not 0 <= end < count:
                yield Fault(register, f"it names actor {end}; there are {count} actors.")
            elif plan.actors[end].stage != register.stage:
                yield Fault(register, f"{name_of(plan.actors[end])} is of another stage.")
        if not register.readers:
            yield Fault(register, "no actor reads it.")


def _find_one_sided(plan: Plan) -> Iterator[Fault]:
    """An actor and its registers name one another."""
    said = {(a.id, r, True) for a in plan.actors for r in a.inputs}
    said |= {(a.id, r, False) for a in plan.actors for r in a.outputs}
    held = {(k, r.id, True) for r in plan.registers for k in r.readers}
    held |= {(r.producer, r.id, False) for r in plan.registers if r.producer is not None}
    for actor, register, reads in sorted(said ^ held):
        does = "reads" if reads else "fills"
        known = (actor, register, reads) in said
        other = "the register does not name it" if known else "it does not"
        yield Fault(plan.actors[actor], f"{does} register {register} by one end alone: {other}.")


def _find_bad_slots(plan: Plan) -> Iterator[Fault]:
    """A register has slots, and no more versions than slots."""
    for register in plan.registers:
        if not (register.slots >= 1 and 0 <= register.initial <= register.slots):
            fact = f"it has {register.slots} slots, {register.initial} of them full at the start."
            yield Fault(register, fact)


def _find_mixed_speeds(plan: Plan) -> Iterator[Fault]:
    """An actor of one act a step reads registers that change once a step.

    A reader returns as many versions a step as there are made, or a ring fills for good.
    """
    if plan.micro_batches == 1:
        return
    for register in plan.registers:
        slow = [k for k in register.readers if plan.actors[k].per_step]
        if slow and not register.per_step:
            reader = plan.actors[slow[0]].name
            fact = f"it is filled with every micro-batch; {reader} reads it once a step."
            yield Fault(register, fact)


def _find_wrong_contents(plan: Plan) -> Iterator[Fault]:
    """The producer of a register makes its tensors."""
    for register in plan.registers:
        if register.producer is None:
            continue
        producer = plan.actors[register.producer]
        makes = {*producer.makes, *(variable for variable, _ in producer.updates)}
        for name in register.tensors:
            if name not in makes:
                yield Fault(register, f"it holds %{name}, which {name_of(producer)} does not make.")


def _find_lost_reads(plan: Plan) -> Iterator[Fault]:
    """An actor reads registers that hold what its work reads."""
    for actor in plan.actors:
        there = {name for r in actor.inputs for name in plan.registers[r].tensors}
        there.update(variable for variable, _ in actor.updates)  # it reads its own weight in place
        for name in actor.reads:
            if name not in there:
                yield Fault(actor, f"none of the registers that it reads has %{name}.")


def _find_wrong_bytes(plan: Plan) -> Iterator[Fault]:
    """A slot has the bytes of its tensors' largest shards."""
    for register in plan.registers:
        needed = sum(map(plan.tensor_bytes, register.tensors))
        if needed != register.num_bytes:
            fact = f"it has {register.num_bytes} bytes; its tensors need {needed} on a rank."
            yield Fault(register, fact)


def _find_empty_cycle(plan: Plan) -> Iterator[Fault]:
    """Every cycle of waits has a token at the start.

    Tokens are versions that readers wait for, and credits that producers wait for.  A cycle without
    one never begins (Commoner et al. 1971, marked graphs); that others end the rehearsal proves.
    """
    try:
        TopologicalSorter(_waits_at_start(plan)).prepare()
    except CycleError as error:
        around = [plan.actors[k] for k in error.args[1]]
        chain = " <- ".join(f"{actor.id} {actor.name}" for actor in around)
        yield Fault(around[0], f"it waits for itself: {chain}.")


def _waits_at_start(plan: Plan) -> dict[int, set[int]]:
    """Return actor -> the actors that must act before it first can."""
    waits: dict[int, set[int]] = {actor.id: set() for actor in plan.actors}
    for actor in plan.actors:
        if isinstance(actor.work, TransferWork) and actor.kind == RECEIVE:
            waits[actor.id].update(set(plan.channel_ends[actor.work.channel]) - {actor.id})
    for register in plan.registers:
        if (producer := register.producer) is None:
            continue
        for reader in register.readers:
            if register.initial == 0:
                waits[reader].add(producer)
            if register.initial == register.slots:
                waits[producer].add(reader)
    return waits


REGISTER_RULES: Rules[Plan] = {
    REGISTERS: (
        _find_broken_ends,
        _find_one_sided,
        _find_bad_slots,
        _find_mixed_speeds,
        _find_wrong_contents,
        _find_lost_reads,
        _find_wrong_bytes,
        _find_empty_cycle,
    )
}
