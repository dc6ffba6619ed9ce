"""ClockState: all that changes while a rehearsal runs, and the one jump over what repeats."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND, Actor, Plan, TransferWork
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.cost.live import Live
from flowrun.engine.rehearsal.link_traffic import LinkTraffic
from flowrun.engine.rehearsal.shared_cores import SharedCores

_DIGITS = 48  # binary, of the sum of all acts of a step: every time is exact, and no sum rounds


class Event(NamedTuple):
    """An act on the timeline; seconds on the virtual clock."""

    stage: int
    actor: int
    act: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActTable:
    """Constants of every actor, by actor id.

    seconds: of one act; crowding_s: what of it is waited only while others have the cores.
    quantum: all times are multiples of it, so that sums of a few steps are exact and what happens
        again happens at the same distance, to the last bit.
    stage, acts: stage, and acts in a step.  computes, paces: see Actor.
    needs_core: acts run on a core of the host.
    queue, channel: of Plan.queue and of a transfer, or -1.  ends_foreseen: see Plan.foresees_end.
    """

    seconds: tuple[float, ...]
    crowding_s: tuple[float, ...]
    quantum: float
    stage: tuple[int, ...]
    acts: tuple[int, ...]
    computes: tuple[bool, ...]
    paces: tuple[bool, ...]
    needs_core: tuple[bool, ...]
    queue: tuple[int, ...]
    channel: tuple[int, ...]
    ends_foreseen: tuple[bool, ...]

    @staticmethod
    def of(plan: Plan, cost: Callable[[Actor], float]) -> ActTable:
        """cost: seconds of one act, before they are rounded to quanta."""
        actors = plan.actors
        seconds = [cost(actor) for actor in actors]
        acts = tuple(map(plan.acts_per_step, actors))
        total = sum(each * n for each, n in zip(seconds, acts, strict=True))
        quantum = math.ldexp(1.0, math.frexp(total)[1] - _DIGITS)

        def rounded(value: float) -> float:
            return round(value / quantum) * quantum

        exact = tuple(map(rounded, seconds))
        return ActTable(
            seconds=exact,
            crowding_s=tuple(map(min, exact, (rounded(actor.crowding_s) for actor in actors))),
            quantum=quantum,
            stage=tuple(actor.stage for actor in actors),
            acts=acts,
            computes=tuple(actor.computes for actor in actors),
            paces=tuple(actor.paces for actor in actors),
            needs_core=tuple(actor.kind not in (BOX, SEND, RECEIVE) for actor in actors),
            queue=tuple(map(plan.queue, actors)),
            channel=tuple(
                actor.work.channel if isinstance(actor.work, TransferWork) else -1
                for actor in actors
            ),
            ends_foreseen=tuple(map(plan.foresees_end, actors)),
        )


class Snapshot(NamedTuple):
    """The state at one moment.

    key: all that decides what follows; equal keys have equal futures.
    act: of the anchor (period.py).  now: in seconds.
    events, issued, turns: how many were written down so far, and taken on each rank.
    """

    key: tuple[object, ...]
    act: int
    now: float
    events: int
    issued: dict[tuple[int, int], int]
    turns: list[dict[int, int]]


class ClockState:
    """The state of every rank of a plan at one moment of the virtual time.

    ranks: one scheduler a stage.  began: actor -> when its act under way began.
    posted: (channel, act) -> the actor that waits for the other end of a transfer.
    heap: (end, number, actors) of what is under way.
    left, step_ends: acts that each step still has, and when its last one so far ended.
    records: events and `issued` are recorded.  memory: bytes that are live, where they are counted.
    at_start: actors of micro-batches whose next act is the first of a step; turned: how often one
    has come there.
    """

    def __init__(
        self, plan: Plan, table: ActTable, steps: int, *, records: bool, count_memory: bool
    ) -> None:
        self.plan = plan
        self.records = records
        self.table = table
        self.ranks = [Scheduler(plan, stage, steps) for stage in range(len(plan.placements))]
        self.now = 0.0
        self.computing = [False] * len(self.ranks)
        self.began: dict[int, float] = {}
        self.traffic = LinkTraffic(plan, table.quantum)
        self.cores = SharedCores(plan, table.quantum) if SharedCores.are_needed(plan) else None
        self.posted: dict[tuple[int, int], int] = {}
        self.heap: list[tuple[float, int, tuple[int, ...]]] = []
        self.num_begun = 0  # acts and transfers: what ends at once, ends in this order
        self.events: list[Event] = []
        self.issued: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.step_ends = [0.0] * steps
        self.left = [sum(table.acts)] * steps
        stages = range(len(self.ranks)) if count_memory else ()
        self.memory = [Live(plan, stage) for stage in stages]
        self.at_start, self.turned = len(self.often), 0

    def record(self, actor: int, act: int, queue: int) -> None:
        """Write down an act of communication that is issued, or of compute that has ended, in the
        order of a queue; of a message both ends at once, which makes it one order.
        """
        if queue >= 0 and self.records:
            group = self.table.stage[actor], queue
            self.issued.setdefault(group, []).append((actor, act))

    def count_place(self, place: int, acts: int) -> None:
        """Count that an actor has ended the act at a place of its step, which has `acts` acts."""
        if acts > 1 and not place:
            self.at_start -= 1
        elif acts > 1 and place == acts - 1:
            self.at_start += 1
            self.turned += 1

    def push(self, end: float, actors: tuple[int, ...]) -> None:
        self.num_begun += 1
        heapq.heappush(self.heap, (end, self.num_begun, actors))

    def key(self, act: int, step: int) -> tuple[object, ...]:
        """All that decides what follows, seen from now and from micro-batch `act` of `step`."""
        now = self.now
        since = [act if n > 1 else step for n in self.table.acts]
        return (
            act % self.round,
            tuple([(end - now, actors) for end, _, actors in sorted(self.heap)]),  # under way
            self.traffic.moment(now),
            self.cores.moment(now) if self.cores else (),
            tuple(self.computing),
            frozenset((c, a - since[actor], actor) for (c, a), actor in self.posted.items()),
            tuple(rank.moment(since) for rank in self.ranks),
            tuple(memory.moment() for memory in self.memory),
        )

    def key_of_step(self, act: int) -> tuple[object, ...]:
        """The key at micro-batch `act`, seen from its step."""
        step = act // self.plan.micro_batches
        turns = tuple(
            count - step * len(rank.order[axis])
            for rank in self.ranks
            for axis, count in rank.issued.items()
        )
        return (*self.key(act, step), turns)

    @property
    def round(self) -> int:
        """Micro-batches after which the turns of chunks repeat."""
        return self.plan.schedule.round

    @property
    def often(self) -> list[int]:
        return [k for k, n in enumerate(self.table.acts) if n > 1]

    def acts_of(self, actor: int) -> int:
        return self.ranks[self.table.stage[actor]].acts[actor]

    def snapshot(self, act: int) -> Snapshot:
        issued = {group: len(acts) for group, acts in self.issued.items()}
        turns = [dict(rank.issued) for rank in self.ranks]
        return Snapshot(self.key(act, 0), act, self.now, len(self.events), issued, turns)

    def advance(self, earlier: Snapshot, later: Snapshot, times: int) -> None:
        """Go on as if the period between two snapshots, the later one of now, had happened `times`
        more.

        The queues do not change: the keys of both snapshots are equal.
        """
        acts, period_s = later.act - earlier.act, later.now - earlier.now
        self._repeat_records(earlier, later, times)
        more, wait = times * acts, times * period_s
        for actor in self.often:
            self.left[self.acts_of(actor) // self.plan.micro_batches] -= more
        self.now += wait
        self.heap = [(end + wait, n, actors) for end, n, actors in self.heap]
        self.traffic.forward(wait)
        if self.cores:
            self.cores.forward(wait)
        self.began = {actor: began + wait for actor, began in self.began.items()}
        self.posted = {
            (channel, act + (more if self.table.acts[actor] > 1 else 0)): actor
            for (channel, act), actor in self.posted.items()
        }
        for rank, before, now in zip(self.ranks, earlier.turns, later.turns, strict=True):
            rank.skip_ahead(more, {axis: times * (now[axis] - before[axis]) for axis in now})
        for memory in self.memory:
            memory.forward(more)

    def _repeat_records(self, earlier: Snapshot, later: Snapshot, times: int) -> None:
        """Write down the period's events, and what was issued, `times` more."""
        acts, period_s = later.act - earlier.act, later.now - earlier.now
        again = self.events[earlier.events : later.events]
        for k in range(1, times + 1):
            wait = k * period_s
            self.events += [
                Event(e.stage, e.actor, e.act + k * acts, e.start + wait, e.end + wait)
                for e in again
            ]
        for group, issued in self.issued.items():
            repeated = issued[earlier.issued.get(group, 0) : later.issued[group]]
            for k in range(1, times + 1):
                issued += [(actor, act + k * acts) for actor, act in repeated]
