"""Random small plans and a simulation of their actors, with acts and messages in any order.

A plan here has the two rates of a training step: actors of every micro-batch, which read each
other's registers and the weights; and actors of every step, which read accumulated sums and make
the next weights.  Buffers are real rings: version v lies in slot v mod slots, and a reader that
finds another version there has lost a register.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hypothesis import strategies as st

from flowrun.engine.actors.protocol import (
    ActorSpec,
    Ring,
    Token,
    begin,
    can_act,
    end,
    idle,
    initial_state,
    missing,
    receive,
    violations,
    wire,
)

Fault = Callable[[Sequence[Token]], Sequence[Token]]  # what is sent -> what is sent instead


@dataclass(frozen=True)
class Edge:
    """A register.  initial: versions there at the start (1: a weight)."""

    producer: int
    readers: tuple[int, ...]
    slots: int
    per_step: bool
    initial: int = 0


@dataclass(frozen=True)
class SmallPlan:
    """micro: the first actors act with every micro-batch, the rest once a step."""

    micro: int
    per_step: int
    edges: tuple[Edge, ...]
    micro_batches: int
    steps: int

    @property
    def num_actors(self) -> int:
        return self.micro + self.per_step

    def acts(self, actor: int) -> int:
        return self.micro_batches if actor < self.micro else 1

    def every(self, actor: int, edge: Edge) -> int:
        """Acts of an actor, producer or reader, to a version of a register."""
        return self.acts(actor) if edge.per_step else 1

    def specs(self) -> dict[int, ActorSpec]:
        """As the scheduler makes them of a plan."""
        acts = {actor: self.acts(actor) for actor in range(self.num_actors)}
        rings = (
            Ring(k, e.producer, e.readers, e.slots, per_step=e.per_step, initial=e.initial)
            for k, e in enumerate(self.edges)
        )
        return wire(acts, rings, self.steps)

    def reads(self, actor: int) -> list[tuple[int, int]]:
        """(register, acts that a version lasts) of what an actor reads."""
        return [(k, self.every(actor, e)) for k, e in enumerate(self.edges) if actor in e.readers]

    def fills(self, actor: int) -> list[tuple[int, Edge, int]]:
        """(register, edge, acts that a version takes) of what an actor fills."""
        return [
            (k, e, self.every(actor, e))
            for k, e in enumerate(self.edges)
            if e.producer == actor and e.readers
        ]

    def value(self, register: int, version: int) -> int:
        """What a version must hold: a recursion over what its acts read."""
        return _value(self, register, version)


@lru_cache(maxsize=100_000)
def _value(plan: SmallPlan, register: int, version: int) -> int:
    edge = plan.edges[register]
    if version < edge.initial:
        return hash((register, -1))
    every = plan.every(edge.producer, edge)
    first = (version - edge.initial) * every
    return sum(_addend(plan, edge.producer, act) for act in range(first, first + every))


def _addend(plan: SmallPlan, actor: int, act: int) -> int:
    reads = [
        _value(plan, k, act // plan.every(actor, e))
        for k, e in enumerate(plan.edges)
        if actor in e.readers
    ]
    return hash((actor, act, tuple(reads)))


@st.composite
def small_plans(draw: st.DrawFn) -> SmallPlan:
    """Every plan here ends: act by act in the order of the actors is a way."""
    micro, per_step = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    everyone = range(micro + per_step)
    edges = []
    for actor in everyone:
        for per_step_register in (False, True):
            group = range(micro, len(everyone)) if per_step_register else range(micro)
            later = [reader for reader in group if reader > actor]
            if not later:
                continue
            readers = draw(st.lists(st.sampled_from(later), unique=True, max_size=3))
            slots = draw(st.integers(1, 3))
            edges.append(Edge(actor, tuple(sorted(readers)), slots, per_step_register))
        if actor >= micro:
            readers = draw(st.lists(st.sampled_from(range(micro)), unique=True, min_size=1))
            edges.append(Edge(actor, tuple(sorted(readers)), 1, True, initial=1))
    return SmallPlan(
        micro, per_step, tuple(edges), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    )


class Simulation:
    """Actors, rings, acts under way and messages under way; whoever drives it chooses the order."""

    def __init__(self, plan: SmallPlan, fault: Fault = tuple) -> None:
        self.plan = plan
        self.fault = fault
        specs = plan.specs()
        self.specs = [specs[actor] for actor in range(plan.num_actors)]
        self.states = [initial_state(spec) for spec in self.specs]
        self.acts = [0] * plan.num_actors
        self.running: list[int] = []
        # (register, slot) -> (version, value)
        self.rings: dict[tuple[int, int], tuple[int, int]] = {}
        for k, edge in enumerate(plan.edges):
            if edge.initial:
                self.rings[k, 0] = (0, plan.value(k, 0))
        self.messages: list[Token] = []
        self.results: dict[tuple[int, int], int] = {}  # (actor, act) -> addend

    def ready(self) -> list[int]:
        pairs = zip(self.specs, self.states, strict=True)
        return [spec.actor for spec, state in pairs if can_act(spec, state)]

    def begin(self, actor: int) -> None:
        """Take the credits; a version that is begun overwrites its slot at once."""
        act = self.acts[actor]
        reads = [self._read(k, act // every) for k, every in self.plan.reads(actor)]
        self.results[actor, act] = hash((actor, act, tuple(reads)))
        for k, edge, every in self.plan.fills(actor):
            if act % every == 0:
                version = edge.initial + act // every
                self.rings[k, version % edge.slots] = (version, 0)
        self.states[actor] = begin(self.states[actor])
        self.running.append(actor)

    def end(self, actor: int) -> None:
        """Fill the slots, then tell."""
        act = self.acts[actor]
        for k, every in self.plan.reads(actor):  # nobody may have written what an act still reads
            self._read(k, act // every)
        for k, edge, every in self.plan.fills(actor):
            version = edge.initial + act // every
            key = (k, version % edge.slots)
            self.rings[key] = (version, self.rings[key][1] + self.results[actor, act])
        self.running.remove(actor)
        self.acts[actor] += 1
        self.states[actor], sent = end(self.specs[actor], self.states[actor], self.acts[actor])
        self.messages.extend(self.fault(sent))

    def deliver(self, index: int) -> None:
        """Any message under way may arrive next."""
        message = self.messages.pop(index)
        self.states[message.to] = receive(self.states[message.to], message)

    def broken(self) -> list[str]:
        pairs = zip(self.specs, self.states, strict=True)
        return [
            fact
            for spec, state in pairs
            for fact in violations(spec, state, running=spec.actor in self.running)
        ]

    def drain(self, choose: Callable[[int], int]) -> None:
        """To the end: choose(n) picks among n things that can happen."""
        while count := len(self.ready()) + len(self.running) + len(self.messages):
            k = choose(count)
            ready, running = self.ready(), self.running
            if k < len(ready):
                self.begin(ready[k])
            elif k < len(ready) + len(running):
                self.end(running[k - len(ready)])
            else:
                self.deliver(k - len(ready) - len(running))
            assert not (found := self.broken()), found

    def unreasoned(self) -> list[int]:
        """Idle unfinished actors of which `can_act` and `missing` tell different things."""
        return [
            spec.actor
            for spec, state in zip(self.specs, self.states, strict=True)
            if idle(state)
            if can_act(spec, state) == bool(missing(spec, state))
        ]

    def check_end(self) -> None:
        """Every act was done, with the right values, and every slot came back: a later run of the
        same plan can begin where this one has come to rest.
        """
        for spec, state in zip(self.specs, self.states, strict=True):
            acts = self.acts[spec.actor]
            assert acts == spec.limit, f"{spec.actor} waits for {missing(spec, state)}"
            assert state == initial_state(spec, acts)
        for (actor, act), found in self.results.items():
            assert found == _addend(self.plan, actor, act)

    def _read(self, register: int, version: int) -> int:
        slots = self.plan.edges[register].slots
        found, value = self.rings[register, version % slots]
        assert found == version, f"register {register}: version {version} lost, {found} is there"
        return value
