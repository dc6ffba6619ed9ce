"""Promises about registers: their ends exist; slots, rates and bytes are right; no deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from flowrun.engine.actors.plan import RECEIVE, REGISTERS, Actor, Plan, RegionWork, TransferWork
from flowrun.engine.verify.rules import Fault, Promise, name_of


def _find_broken_ends(plan: Plan) -> Iterator[Fault]:
    count = len(plan.actors)
    for k, register in enumerate(plan.registers):
        if register.id != k:
            yield Fault(name_of(register), f"it is number {k} of the plan's registers.")
        ends = [*register.readers, *(() if register.producer is None else (register.producer,))]
        for end in ends:
            if not 0 <= end < count:
                yield Fault(name_of(register), f"it names actor {end}; there are {count} actors.")
            elif plan.actors[end].stage != register.stage:
                yield Fault(name_of(register), f"{name_of(plan.actors[end])} is of another stage.")
        if not register.readers:
            yield Fault(name_of(register), "no actor reads it.")


def _find_one_sided(plan: Plan) -> Iterator[Fault]:
    """Actors and registers name one another."""
    said = {(a.id, r, True) for a in plan.actors for r in a.inputs}
    said |= {(a.id, r, False) for a in plan.actors for r in a.outputs}
    held = {(k, r.id, True) for r in plan.registers for k in r.readers}
    held |= {(r.producer, r.id, False) for r in plan.registers if r.producer is not None}
    for actor, register, reads in sorted(said ^ held):
        does = "reads" if reads else "fills"
        other = (
            "the register does not name it" if (actor, register, reads) in said else "it does not"
        )
        fact = f"{does} register {register} by one end alone: {other}."
        yield Fault(name_of(plan.actors[actor]), fact)


def _find_bad_slots(plan: Plan) -> Iterator[Fault]:
    for register in plan.registers:
        if not (register.slots >= 1 and 0 <= register.initial <= register.slots):
            fact = f"it has {register.slots} slots, {register.initial} of them full at the start."
            yield Fault(name_of(register), fact)


def _find_mixed_speeds(plan: Plan) -> Iterator[Fault]:
    """A reader returns as many versions a step as there are made, or a ring fills for good."""
    if plan.micro_batches == 1:
        return
    for register in plan.registers:
        slow = [k for k in register.readers if plan.actors[k].per_step]
        if slow and not register.per_step:
            reader = plan.actors[slow[0]].name
            fact = f"it is filled with every micro-batch; {reader} reads it once a step."
            yield Fault(name_of(register), fact)


def _find_wrong_contents(plan: Plan) -> Iterator[Fault]:
    for register in plan.registers:
        if register.producer is None:
            continue
        producer = plan.actors[register.producer]
        makes = {*producer.makes, *_variables_in_place(producer)}
        for name in register.tensors:
            if name not in makes:
                fact = f"it holds %{name}, which {name_of(producer)} does not make."
                yield Fault(name_of(register), fact)


def _find_lost_reads(plan: Plan) -> Iterator[Fault]:
    for actor in plan.actors:
        there = {name for r in actor.inputs for name in plan.registers[r].tensors}
        there.update(_variables_in_place(actor))  # an update reads its own weight in place
        for name in actor.reads:
            if name not in there:
                yield Fault(name_of(actor), f"none of the registers that it reads has %{name}.")


def _find_wrong_bytes(plan: Plan) -> Iterator[Fault]:
    for register in plan.registers:
        needed = sum(map(plan.tensor_bytes, register.tensors))
        if needed != register.num_bytes:
            fact = f"it has {register.num_bytes} bytes; its tensors need {needed} on a rank."
            yield Fault(name_of(register), fact)


def _find_empty_cycle(plan: Plan) -> Iterator[Fault]:
    """Tokens are versions that readers wait for, and credits that producers wait for.

    A cycle of waits in which no token is there at the start never begins (Commoner et al. 1971,
    marked graphs); that the others end is what the rehearsal proves.
    """
    try:
        TopologicalSorter(_waits_at_start(plan)).prepare()
    except CycleError as error:
        around = [plan.actors[k] for k in error.args[1]]
        chain = " <- ".join(f"{actor.id} {actor.name}" for actor in around)
        yield Fault(name_of(around[0]), f"it waits for itself: {chain}.")


def _waits_at_start(plan: Plan) -> dict[int, set[int]]:
    """Return actor -> the actors that must act before it first can."""
    waits: dict[int, set[int]] = {actor.id: set() for actor in plan.actors}
    for actor in plan.actors:
        if isinstance(actor.work, TransferWork) and actor.kind == RECEIVE:
            waits[actor.id].update(set(plan.channel_ends(actor.work.channel)) - {actor.id})
    for register in plan.registers:
        if (producer := register.producer) is None:
            continue
        for reader in register.readers:
            if register.initial == 0:
                waits[reader].add(producer)
            if register.initial == register.slots:
                waits[producer].add(reader)
    return waits


REGISTER_RULES: tuple[Promise[Plan], ...] = (
    Promise(
        REGISTERS, "producer and readers of a register are actors of its stage.", _find_broken_ends
    ),
    Promise(REGISTERS, "an actor and its registers name one another.", _find_one_sided),
    Promise(REGISTERS, "a register has slots, and no more versions than slots.", _find_bad_slots),
    Promise(REGISTERS, "what acts once a step reads what changes once a step.", _find_mixed_speeds),
    Promise(REGISTERS, "the producer of a register makes its tensors.", _find_wrong_contents),
    Promise(REGISTERS, "an actor reads registers that hold what its work reads.", _find_lost_reads),
    Promise(REGISTERS, "a slot has the bytes of its tensors' largest shards.", _find_wrong_bytes),
    Promise(REGISTERS, "every cycle of waits has a token at the start.", _find_empty_cycle),
)


def _variables_in_place(actor: Actor) -> Iterator[str]:
    """Variables that an actor changes in place."""
    if isinstance(actor.work, RegionWork):
        yield from (variable for variable, _ in actor.work.updates)
