"""rehearse: the plan executed before anything starts, by the same protocol, on a virtual clock.

One rank stands for all ranks of its stage (they differ only by coordinate), so the cost is flat in
the number of ranks.  A rank computes one act at a time; its collectives and messages share one link
and run beside, and so does what makes batches ready, each actor on a core of its own.  A transfer
ends when both ends have posted it.  Yields: a proof that the plan ends (else PlanError with the
wait cycle), the order of collectives in each group, step time and bubble, peak bytes, and the
timeline.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowrun.engine.cost.live import Live
from flowrun.engine.errors import PlanError
from flowrun.engine.plan import BOX, RECEIVE, SEND, Actor, Plan, TransferWork
from flowrun.engine.protocol import counts
from flowrun.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Event:
    """One act on the timeline; seconds on the virtual clock."""

    stage: int
    actor: int
    act: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What is foreseen.

    step_s: of a step in the steady state.  first_step_s: of a cold one.
    bubble: share of a step in which a rank of the stage does not compute, by stage.
    peak_bytes: of one rank, by stage.  bound_bytes: the same with every stash full, which messages
        that come early or late may bring about.
    sent_bytes: of all ranks in a step.
    first_step: the timeline of a cold step.
    order: see Plan.order.
    """

    step_s: float
    first_step_s: float
    bubble: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bound_bytes: tuple[int, ...]
    sent_bytes: float
    first_step: tuple[Event, ...]
    order: tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...]


def rehearse(plan: Plan, seconds: Callable[[Actor], float] | None = None) -> Rehearsal:
    """Run one cold step, fix the order of collectives, then run again to see a steady step.

    seconds: cost of one act, if not the foreseen one (unit times in tests).  Raises PlanError if
    the plan cannot end.
    """
    cost = seconds or (lambda actor: actor.seconds)
    cold = _Clock(plan, cost, steps=1)
    cold.run()
    order = cold.order()
    warm = _Clock(replace(plan, order=order), cost, steps=4)
    warm.run()
    step_s = warm.step_ends[2] - warm.step_ends[1]  # with a step before it and one behind it
    busy = [0.0] * len(plan.placements)
    for event in cold.events:
        if _computes(plan.actors[event.actor]):
            busy[event.stage] += event.end - event.start
    sent = sum(actor.sent_bytes * plan.acts_per_step(actor) for actor in plan.actors)
    return Rehearsal(
        step_s,
        cold.now,
        tuple(1 - b / step_s if step_s else 0.0 for b in busy),
        tuple(memory.peak for memory in warm.memory),
        tuple(memory.bound for memory in warm.memory),
        sent,
        tuple(cold.events),
        order,
    )


def _computes(actor: Actor) -> bool:
    """False for what runs beside a rank's compute."""
    return actor.kind not in (BOX, SEND, RECEIVE) and not actor.beside


class _Clock:
    """All stages on one virtual clock."""

    def __init__(self, plan: Plan, cost: Callable[[Actor], float], steps: int) -> None:
        self.plan = plan
        self.cost = cost
        self.steps = steps
        self.ranks = [Scheduler(plan, stage, steps) for stage in range(len(plan.placements))]
        self.now = 0.0
        self.computing = [False] * len(self.ranks)
        self.link_free = [0.0] * len(self.ranks)
        self.posted: dict[
            tuple[int, int], int
        ] = {}  # (channel, act) -> stage that waits at the other end
        self.heap: list[tuple[float, int, int, tuple[int, ...]]] = []
        self.events: list[Event] = []
        self.collectives: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.ends = [actor.id for actor in plan.actors]
        self.step_ends = [0.0] * steps
        self.memory = [Live(plan, stage) for stage in range(len(self.ranks))]

    def run(self) -> None:
        """To the end, or PlanError."""
        self._start_all()
        while self.heap:
            self.now, _, stage, actors = heapq.heappop(self.heap)
            for actor in actors:
                self._end(actor, stage)
            self._start_all()
        if not all(rank.finished() for rank in self.ranks):
            raise deadlock(self.plan, self.ranks)

    def order(self) -> tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...]:
        """(stage, axis) -> collectives as they were issued."""
        return tuple((group, tuple(acts)) for group, acts in sorted(self.collectives.items()))

    def _start_all(self) -> None:
        started = True
        while started:
            started = False
            for stage, rank in enumerate(self.ranks):
                while launched := rank.next_communication():
                    started = True
                    self._communicate(stage, launched.actor, launched.act)
                while launched := rank.next_supply():
                    started = True
                    self.memory[stage].begin(launched.actor, launched.act)
                    self._run(stage, launched.actor, launched.act, self.now)
                if not self.computing[stage] and (launched := rank.next_compute()):
                    started = self.computing[stage] = True
                    self.memory[stage].begin(launched.actor, launched.act)
                    self._run(stage, launched.actor, launched.act, self.now)

    def _run(
        self, stage: int, actor: int, act: int, start: float, also: tuple[int, ...] = ()
    ) -> None:
        end = start + self.cost(self.plan.actors[actor])
        for each in (actor, *also):
            where = self.plan.actors[each].stage
            self.events.append(Event(where, each, act, start, end))
        heapq.heappush(self.heap, (end, len(self.events), stage, (actor, *also)))

    def _communicate(self, stage: int, actor: int, act: int) -> None:
        work = self.plan.actors[actor].work
        self.memory[stage].begin(actor, act)  # a message waits for its other end in memory
        if isinstance(work, TransferWork):
            other = self.posted.pop((work.channel, act), None)
            if other is None:
                self.posted[work.channel, act] = actor
                return
            ends = (self.plan.actors[actor].stage, self.plan.actors[other].stage)
            start = max(self.now, *(self.link_free[s] for s in ends))
            self._run(stage, actor, act, start, (other,))
            for s in ends:
                self.link_free[s] = start + self.cost(self.plan.actors[actor])
            return
        axis = work.step.axis  # type: ignore[union-attr]
        self.collectives.setdefault((stage, axis), []).append((actor, act))
        start = max(self.now, self.link_free[stage])
        self._run(stage, actor, act, start)
        self.link_free[stage] = start + self.cost(self.plan.actors[actor])

    def _end(self, actor: int, stage: int) -> None:
        described = self.plan.actors[actor]
        rank = self.ranks[described.stage]
        if _computes(described):
            self.computing[described.stage] = False
        act = rank.acts[actor]
        self.memory[described.stage].end(actor, act)
        rank.done(actor)
        step = act // self.plan.acts_per_step(described)
        self.step_ends[step] = max(self.step_ends[step], self.now)


# ---- who waits for whom --------------------------------------------------------------------------

Wait = tuple[str, int]  # ("input" | "credit", register), ("turn", axis), ("peer", channel or -1)


def deadlock(plan: Plan, ranks: Sequence[Scheduler]) -> PlanError:
    """The error that tells who waits for which register of which rank, around the cycle.

    ranks: one of each stage.
    """
    cycle = _cycle(plan, ranks)
    lines = [_story(plan, ranks, actor, *wait) for actor, wait in cycle]
    short = [register for _, (why, register) in cycle if why == "credit"]
    return PlanError(
        f"placement.in_flight (register {short[0]})" if short else "plan",
        "the plan would deadlock: its registers do not suffice.\n" + "\n".join(lines),
        "Give the registers more slots: a larger placement.in_flight or engine.register_slots.",
    )


def _cycle(plan: Plan, ranks: Sequence[Scheduler]) -> list[tuple[int, Wait]]:
    """From an actor that waits to the one it waits for, until one repeats."""
    waits: dict[int, Wait] = {a: why[0] for rank in ranks for a, why in rank.waits().items()}
    for rank in ranks:
        waits.update({actor: ("peer", _channel(plan, actor)) for actor in rank.busy()})
    seen: dict[int, Wait] = {}
    actor = next(iter(waits), None)
    while actor in waits and actor not in seen:
        seen[actor] = waits[actor]
        actor = _blamed(plan, ranks, actor, *waits[actor])
    chain = list(seen.items())
    return chain[list(seen).index(actor) :] if actor in seen else chain


def _blamed(plan: Plan, ranks: Sequence[Scheduler], actor: int, why: str, what: int) -> int | None:
    """Whom an actor waits for; None if that cannot be told from one rank of each stage."""
    match why:
        case "input":
            return plan.registers[what].producer
        case "credit":
            return _holder(plan, ranks, what)
        case "turn":
            rank = ranks[plan.actors[actor].stage]
            order = rank.order.get(what)
            return order[rank.issued[what] % len(order)][0] if order else None
    ends = (a.id for a in plan.actors if what >= 0 and _channel(plan, a.id) == what)
    return next((end for end in ends if end != actor), None)


def _holder(plan: Plan, ranks: Sequence[Scheduler], register: int) -> int:
    """The reader that has given the fewest credits of a register back: it holds the oldest slot."""
    maker = plan.registers[register].producer
    assert maker is not None, f"register {register} is constant: nobody waits for a slot of it"
    rank = ranks[plan.actors[maker].stage]
    spec = rank.specs[maker]
    ports = zip(counts(spec, rank.states[maker]), spec.ports, strict=True)
    ends = ((n, port.other.to) for n, port in ports if port.fills and port.register == register)
    return min(ends)[1]


def _story(plan: Plan, ranks: Sequence[Scheduler], actor: int, why: str, what: int) -> str:
    """What one actor waits for, in words."""
    stage = plan.actors[actor].stage
    place = f"{_name(plan, actor)} on rank {plan.placements[stage].ranks[0]} (stage {stage})"
    match why:
        case "input":
            maker = _name(plan, plan.registers[what].producer)
            return f"{place} waits to read register {what} from {maker}"
        case "credit":
            holder = _name(plan, _holder(plan, ranks, what))
            free = f"a free slot ({plan.registers[what].slots} in all) of register {what}"
            return f"{place} waits for {free}, held by {holder}"
        case "turn":
            return f"{place} waits for its turn among the collectives of axis {what}"
    other = f"the other end of channel {what}" if what >= 0 else "the other ranks of its group"
    return f"{place} waits for {other}"


def _name(plan: Plan, actor: int | None) -> str:
    return "nobody" if actor is None else f"actor {actor} {plan.actors[actor].name}"


def _channel(plan: Plan, actor: int) -> int:
    work = plan.actors[actor].work
    return work.channel if isinstance(work, TransferWork) else -1
