"""The actor protocol: a pure state machine over tokens.  No I/O, no clock, no tensors (OneFlow,
arXiv 2110.15032, section 4).

A register is a ring of `slots` buffers; version v of it lies in slot v mod slots.  Between its
producer and each of its readers pass as many tokens as it has slots.  A token at the producer is a
credit: a buffer that this reader does not read any more.  A token at the reader is a version to
read.  Each end is a port of its actor; one port more, its own, has a token while the actor is idle
and not at its end.  The one rule is:

    an actor acts when it has a token at every port;
    when the act ends, the tokens that it used go to the other ends.

That is all the scheduling there is.  Rates: an actor that acts m times a step may read a register
that changes once a step (weights): its token lasts `every` = m acts.  Likewise an accumulator's
actor makes one version in m acts: it needs the credit from the first act on, and passes it on, as
a version, with the last.  Invariants, checked by `violations` after each test step: no port has
fewer than 0 or more than `slots` tokens; an act that runs has a token at every port but its own.

A state is one integer of 16 bits a port, its own lowest: tokens come and go by one addition, and
since 0x7fff is added to each count, its highest bit says whether there is a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import NamedTuple

_BITS, _FIELD, _NONE, _OWN = 16, 0xFFFF, 0x7FFF, 1


@dataclass(frozen=True, slots=True)
class Ring:
    """A register, as far as the protocol needs to know it.

    per_step: a version lasts a step, not a micro-batch.  initial: versions there before the first
    act.
    """

    register: int
    producer: int
    readers: tuple[int, ...]
    slots: int
    _: KW_ONLY
    per_step: bool = False
    initial: int = 0


class Token(NamedTuple):
    """A message to an actor: one more token at a port.

    to: the actor.  tokens: what to add to its state (`one_at`).
    """

    to: int
    tokens: int


class Port(NamedTuple):
    """An end of a register.

    fills: the producer's end, where tokens are credits; else the reader's, where they are versions.
    every: acts that one token lasts.  start: tokens before the first act.  other: the other end.
    """

    register: int
    fills: bool
    slots: int
    every: int
    start: int
    other: Token


class LaunchAct(NamedTuple):
    """Effect: run act number `act` of the actor."""

    actor: int
    act: int


def one_at(port: int) -> int:
    """Return the bits of one token at a port, numbered from 0; -1 is the actor's own."""
    return 1 << _BITS * (port + 1)


@dataclass(frozen=True)
class ActorSpec:
    """An actor's ports, those that it reads first; limit: acts until it is done."""

    actor: int
    ports: tuple[Port, ...]
    limit: int

    @cached_property
    def some(self) -> int:
        """The bits that are all set if there is a token at every port."""
        return sum(one_at(k) << _BITS - 1 for k in range(-1, len(self.ports)))

    @cached_property
    def every(self) -> int:
        """The acts that the longest token lasts; the others last one."""
        return max((port.every for port in self.ports), default=1)

    @cached_property
    def passed(self) -> tuple[tuple[int, tuple[Token, ...]], ...]:
        """Tokens that leave and where they go: with most acts, and with each `every`th; versions
        first.
        """
        ports = sorted(range(len(self.ports)), key=lambda k: not self.ports[k].fills)
        often = [k for k in ports if self.ports[k].every == 1]
        return tuple(
            (sum(map(one_at, gone)), tuple(self.ports[k].other for k in gone))
            for gone in (often, ports)
        )


def wire(acts: Mapping[int, int], rings: Iterable[Ring], steps: int) -> dict[int, ActorSpec]:
    """Connect the actors of a rank by its registers.

    acts: of each actor, in a step.

    Registers between the same two actors whose tokens would always move together share the tokens
    of the one with the fewest slots.
    """
    edges: dict[tuple[int, int, bool, int], Ring] = {}
    for ring in rings:
        for reader in ring.readers:
            key = (ring.producer, reader, ring.per_step, ring.initial)
            if key not in edges or ring.slots < edges[key].slots:
                edges[key] = ring
    read: dict[int, list[tuple[Ring, int]]] = {actor: [] for actor in acts}
    filled: dict[int, list[tuple[Ring, int]]] = {actor: [] for actor in acts}
    for (producer, reader, *_), ring in edges.items():
        read[reader].append((ring, producer))
        filled[producer].append((ring, reader))
    ends = {actor: read[actor] + filled[actor] for actor in acts}
    at = {
        (ring.register, actor, other): k
        for actor in acts
        for k, (ring, other) in enumerate(ends[actor])
    }
    specs = {}
    for actor, count in acts.items():
        ports = []
        for k, (ring, other) in enumerate(ends[actor]):
            fills, every = k >= len(read[actor]), count if ring.per_step else 1
            start = ring.slots - ring.initial if fills else ring.initial
            there = Token(other, one_at(at[ring.register, other, actor]))
            ports.append(Port(ring.register, fills, ring.slots, every, start, there))
        specs[actor] = ActorSpec(actor, tuple(ports), steps * count)
    return specs


def state_of(own: int, counts: Sequence[int]) -> int:
    """Return the state with `own` tokens at the actor's own port and `counts` at the others."""
    return sum((n + _NONE) * one_at(k - 1) for k, n in enumerate((own, *counts)))


def counts(spec: ActorSpec, state: int) -> tuple[int, ...]:
    """Return the number of tokens at each port but the actor's own."""
    return tuple((state >> _BITS * (k + 1) & _FIELD) - _NONE for k in range(len(spec.ports)))


def initial_state(spec: ActorSpec, acts: int = 0) -> int:
    """Return the state before anything ran, or after `acts` acts and when all has been read."""
    return state_of(acts < spec.limit, [port.start for port in spec.ports])


def counted_state(
    specs: Mapping[int, ActorSpec], acts: Mapping[int, int], actor: int, *, running: bool
) -> int:
    """Return the state of an actor that follows from what all actors of the rank have done.

    acts: finished ones, by actor.  running: an act of the actor is under way.
    """
    spec = specs[actor]

    def tokens(port: Port) -> int:
        other = port.other.to
        end = next(
            end
            for end in specs[other].ports
            if (end.register, end.other.to, end.fills) == (port.register, actor, not port.fills)
        )
        return port.start + acts[other] // end.every - acts[actor] // port.every

    return state_of(acts[actor] < spec.limit and not running, [*map(tokens, spec.ports)])


def can_act(spec: ActorSpec, state: int) -> bool:
    """Return whether the actor is idle, not at its end, and has a token at every port."""
    return state & spec.some == spec.some


def idle(state: int) -> bool:
    """Return whether no act is running and the actor is not at its end."""
    return state & _FIELD > _NONE


def missing(spec: ActorSpec, state: int) -> tuple[tuple[str, int], ...]:
    """Return what an idle actor waits for: ("input" | "credit", register)."""
    return tuple(
        ("credit" if port.fills else "input", port.register)
        for port, tokens in zip(spec.ports, counts(spec, state), strict=True)
        if not tokens
    )


def receive(state: int, message: Token) -> int:
    """Return the state after a token has come."""
    return state + message.tokens


def begin(state: int) -> int:
    """Return the state after an act has begun: its tokens are in use."""
    return state - _OWN


def go_on(state: int) -> int:
    """Return the state of an actor that was held back: an act had begun in name only."""
    return state + _OWN


def end(spec: ActorSpec, state: int, acts: int) -> tuple[int, tuple[Token, ...]]:
    """Return the state after an act has ended, and the messages to other actors.

    acts: finished so far, this one included.
    """
    gone, sent = spec.passed[acts % spec.every == 0]
    return state - gone + (_OWN if acts < spec.limit else 0), sent


def violations(spec: ActorSpec, state: int, *, running: bool) -> tuple[str, ...]:
    """Return the invariants that a state breaks: none for every state that the protocol reaches.

    running: an act is under way.
    """
    return tuple(
        f"actor {spec.actor}: {tokens} tokens of {port.slots} for register {port.register}"
        for port, tokens in zip(spec.ports, counts(spec, state), strict=True)
        if not running <= tokens <= port.slots
    )
