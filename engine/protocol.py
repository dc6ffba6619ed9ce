"""The actor protocol: a pure state machine over counters.  No I/O, no clock, no tensors (OneFlow,
arXiv 2110.15032, section 4).

An actor acts when every input register holds something to read and it has a credit for every
output.  That is all the scheduling there is.  A register is a ring of `slots` buffers; version v of
it lies in slot v mod slots.  Every count only grows, so a state is a few integers, and credits are
differences of counts:

    readable(input)   = versions received - versions returned
    credits(output)   = slots - (versions begun - versions returned by the slowest reader)

Rates: an actor that acts m times a step may read a register that changes once a step (weights): it
returns the version after `every` = m acts.  Likewise an accumulator's actor makes one version in m
acts: it takes the credit with the first act and publishes with the last.  Invariants, checked by
`violations` after each test step: 0 <= credits <= slots; a reader never returns what it did not
receive; nothing arrives beyond what was begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Input:
    """A register that an actor reads: acts until the version read is returned."""

    register: int
    every: int = 1


@dataclass(frozen=True, slots=True)
class Output:
    """A register that an actor makes: buffers, readers, acts that make one version, versions there
    before the first act.
    """

    register: int
    slots: int
    readers: tuple[int, ...]
    every: int = 1
    initial: int = 0


@dataclass(frozen=True)
class ActorSpec:
    """What the protocol needs to know of an actor.  limit: acts until it is done (None: no end)."""

    actor: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    limit: int | None = None

    @cached_property
    def input_at(self) -> dict[int, int]:
        """Register -> index among the inputs."""
        return {port.register: k for k, port in enumerate(self.inputs)}

    @cached_property
    def returned_at(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(register, reader) -> (index among the outputs, index among its readers)."""
        return {
            (port.register, reader): (k, r)
            for k, port in enumerate(self.outputs)
            for r, reader in enumerate(port.readers)
        }

    @cached_property
    def announced(self) -> tuple[tuple[int, tuple[Ready, ...]], ...]:
        """For each output the acts that make a version, and the messages that then go out."""
        return tuple(
            (port.every, tuple(Ready(reader, port.register) for reader in port.readers))
            for port in self.outputs
        )


class ActorState(NamedTuple):
    """Counts; every one but `busy` only grows.

    acts: finished.  busy: an act is running.
    received[i]: versions of input i.  returned[o][r]: versions of output o, by its reader r.
    """

    acts: int
    busy: bool
    received: tuple[int, ...]
    returned: tuple[tuple[int, ...], ...]


class Ready(NamedTuple):
    """To a reader: one more version of `register` can be read."""

    to: int
    register: int


class Returned(NamedTuple):
    """To a producer: `reader` has finished with one more version of `register`."""

    to: int
    register: int
    reader: int


class Done(NamedTuple):
    """To an actor: the act that was launched has ended."""

    to: int


class Launch(NamedTuple):
    """Effect: run act number `act` of the actor."""

    actor: int
    act: int


Message = Ready | Returned | Done


def initial_state(
    spec: ActorSpec, sources: dict[int, int] | None = None, acts: int = 0
) -> ActorState:
    """The state before anything ran, or at rest: after `acts` acts, when every reader has returned
    all that was made.

    sources: register -> versions already there (initial weights).
    """
    there = sources or {}
    return ActorState(
        acts,
        False,
        tuple(there.get(port.register, 0) + acts // port.every for port in spec.inputs),
        tuple((acts // port.every,) * len(port.readers) for port in spec.outputs),
    )


def credits(spec: ActorSpec, state: ActorState, index: int) -> int:
    """Free slots of output `index`; one that is being filled over several acts is not free."""
    port = spec.outputs[index]
    begun = port.initial + -(-(state.acts + state.busy) // port.every)
    done = min(state.returned[index], default=port.initial + state.acts // port.every)
    return port.slots - (begun - done)


def can_act(spec: ActorSpec, state: ActorState) -> bool:
    """True if the actor is idle, not at its end, can read all inputs and has a credit for every
    output.

    The same as `missing` without its reasons: it is asked after every message.
    """
    acts, busy, received, returned = state
    if busy or (spec.limit is not None and acts >= spec.limit):
        return False
    for port, count in zip(spec.inputs, received, strict=True):
        if count <= acts // port.every:
            return False
    for out, counts in zip(spec.outputs, returned, strict=True):
        if counts and out.initial + acts // out.every - min(counts) >= out.slots:
            return False
    return True


def missing(spec: ActorSpec, state: ActorState) -> tuple[tuple[str, int], ...]:
    """What an idle actor waits for: ("input" | "credit", register)."""
    acts = state.acts
    waits: list[tuple[str, int]] = []
    for port, received in zip(spec.inputs, state.received, strict=True):
        if received <= acts // port.every:
            waits.append(("input", port.register))
    for out, returned in zip(spec.outputs, state.returned, strict=True):
        version = out.initial + acts // out.every
        finished = min(returned, default=version)
        if version - finished >= out.slots:
            waits.append(("credit", out.register))
    return tuple(waits)


def launch(state: ActorState) -> ActorState:
    """Begin an act: the credits are taken."""
    return state._replace(busy=True)


def step(
    spec: ActorSpec, state: ActorState, message: Message, producers: dict[int, int]
) -> tuple[ActorState, tuple[Message, ...]]:
    """(state, message) -> (state, messages to others).

    producers: register -> the actor that makes it.
    """
    acts, busy, received, returned = state
    match message:
        case Ready(_, register):
            return ActorState(
                acts, busy, _one_more(received, spec.input_at[register]), returned
            ), ()
        case Returned(_, register, reader):
            k, r = spec.returned_at[register, reader]
            counts = _one_more(returned[k], r)
            return ActorState(acts, busy, received, (*returned[:k], counts, *returned[k + 1 :])), ()
        case Done():
            acts += 1
            sent: list[Message] = []
            for every, messages in spec.announced:
                if acts % every == 0:
                    sent += messages
            for port in spec.inputs:
                if acts % port.every == 0 and port.register in producers:
                    sent.append(Returned(producers[port.register], port.register, spec.actor))
            return ActorState(acts, False, received, returned), tuple(sent)
    raise AssertionError(message)


def _one_more(counts: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])


def violations(spec: ActorSpec, state: ActorState) -> tuple[str, ...]:
    """Which invariants a state breaks; empty for every state that the protocol can reach."""
    found: list[str] = []
    for index, port in enumerate(spec.outputs):
        free = credits(spec, state, index)
        if not 0 <= free <= port.slots:
            found.append(
                f"actor {spec.actor}: {free} credits of {port.slots} for register {port.register}"
            )
    for port_in, received in zip(spec.inputs, state.received, strict=True):
        if state.acts // port_in.every > received:
            found.append(
                f"actor {spec.actor}: returned more of register {port_in.register} than it received"
            )
    return tuple(found)
