"""Clock: all stages of a plan on one virtual clock.

One rank stands for all ranks of its stage (they differ only by coordinate), so the cost is flat in
the number of ranks.  A rank computes one act at a time.  Collectives and messages run beside, over
a link for each level of the network and direction (link_traffic.py); what they take of compute
meanwhile makes acts longer.  What makes batches ready runs beside too.  A transfer ends when both
ends have posted it.  Where cores are fewer than what wants them, they are shared (shared_cores.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from flowrun.engine.actors.deadlock import deadlock
from flowrun.engine.actors.plan import BOX, RECEIVE, SEND, Actor, Plan, TransferWork
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.cost.live import Live
from flowrun.engine.ir.graph import COUNT
from flowrun.engine.rehearsal.link_traffic import LinkTraffic
from flowrun.engine.rehearsal.period import Period, steady
from flowrun.engine.rehearsal.shared_cores import SharedCores

_AHEAD = 4  # steps of an endless training behind the last that is looked at: for what runs ahead
_DIGITS = 48  # binary, of the sum of all acts of a step: every time is exact, and no sum rounds


class Event(NamedTuple):
    """One act on the timeline; seconds on the virtual clock."""

    stage: int
    actor: int
    act: int
    start: float
    end: float


def computes(actor: Actor) -> bool:
    """False for what runs beside a rank's compute."""
    return actor.kind not in (BOX, SEND, RECEIVE) and not actor.runs_in_thread


def exact_seconds(plan: Plan, cost: Callable[[Actor], float]) -> tuple[list[float], float]:
    """Of an act of each actor, in whole quanta, so that all sums of a few steps are exact: what
    happens again, happens at the same distance, to the last bit.
    """
    seconds = [cost(actor) for actor in plan.actors]
    acts = map(plan.acts_per_step, plan.actors)
    total = sum(each * n for each, n in zip(seconds, acts, strict=True))
    quantum = math.ldexp(1.0, math.frexp(total)[1] - _DIGITS)
    return [round(each / quantum) * quantum for each in seconds], quantum


class Clock:
    """A number of steps, or as many of an endless training.

    observed: of an endless one, whose memory is counted, and nothing else is written down: no
    events, no order.  shortly: what repeats is run once.
    """

    def __init__(
        self,
        plan: Plan,
        cost: Callable[[Actor], float],
        steps: int,
        *,
        shortly: bool,
        observed: bool = False,
    ) -> None:
        self.plan = plan
        self.seconds, quantum = exact_seconds(plan, cost)
        crowding = [round(actor.crowding_s / quantum) * quantum for actor in plan.actors]
        self._crowding = list(map(min, self.seconds, crowding))
        self.steps = steps
        self.round = len(plan.placements) if plan.chunks > 1 else 1  # micro-batches, see Turns
        self.observed = observed
        # what reads a step ahead would idle in the last
        self.endless = observed or any(actor.phase == COUNT for actor in plan.actors)
        last = steps + (_AHEAD if self.endless else 0)
        self.ranks = [Scheduler(plan, stage, last) for stage in range(len(plan.placements))]
        self.now = 0.0
        self.computing = [False] * len(self.ranks)
        self.began: dict[int, float] = {}  # actor -> when the act under way began
        self.traffic = LinkTraffic(plan, quantum)
        self.cores = SharedCores(plan, quantum) if SharedCores.are_needed(plan) else None
        self.posted: dict[tuple[int, int], int] = {}  # (channel, act) -> the actor that waits
        self.heap: list[tuple[float, int, tuple[int, ...]]] = []
        self.begun = 0  # acts and transfers so far: what ends at once, ends in this order
        self.events: list[Event] = []
        self.collectives: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.step_ends = [0.0] * last
        self.left = [sum(map(plan.acts_per_step, plan.actors))] * last  # acts of each step
        self.memory = [Live(plan, stage) for stage in range(len(self.ranks))] if observed else []
        self._computes = [computes(actor) for actor in plan.actors]
        self._needs_core = [a.kind not in (BOX, SEND, RECEIVE) for a in plan.actors]
        self.stage_of = [actor.stage for actor in plan.actors]
        self.acts = list(map(plan.acts_per_step, plan.actors))
        self.period = Period(self) if shortly else None

    def run(self) -> None:
        """To the end, or until steps repeat; or PlanError."""
        self._start(range(len(self.ranks)))
        self._share()
        period, before = self.period, None
        while self.heap:
            self.now, _, actors = heapq.heappop(self.heap)
            if more := self._longer(actors[0]):
                self._lengthen(actors, more)
                self._share()
                continue
            whole = False
            for actor in actors:
                whole |= self._end(actor)
            self._start(sorted({self.stage_of[actor] for actor in actors}))
            self._share()
            if whole and self.endless and not self.left[self.steps - 1]:
                return
            if period is None:
                continue
            if period.anchor in actors:
                period.look()
            if whole:
                found = steady(self)
                if found == before:
                    return
                before = found
        if not all(rank.finished() for rank in self.ranks):
            raise deadlock(self.plan, self.ranks)

    @property
    def step_s(self) -> float:
        """Of a steady step: the second of those that ended, or of two that are alike the last, with
        a step before it and one behind it.
        """
        ends = [end for end, left in zip(self.step_ends, self.left, strict=True) if not left]
        return ends[2] - ends[1] if len(ends) == self.steps else ends[-1] - ends[-2]

    def order(self) -> tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...]:
        """(stage, axis) -> collectives as they were issued, in the last step; acts of the step."""
        last = self.steps - 1
        return tuple(
            (group, tuple((k, n % self.acts[k]) for k, n in acts if n // self.acts[k] == last))
            for group, acts in sorted(self.collectives.items())
        )

    def _start(self, stages: Iterable[int]) -> None:
        """All that may begin on these stages."""
        for stage in stages:
            rank = self.ranks[stage]
            while launched := rank.next_communication():
                self._communicate(stage, *launched)
            while launched := rank.next_supply():
                self._begin(stage, *launched)
            if not self.computing[stage] and (launched := rank.next_compute()):
                self.computing[stage] = True
                self.traffic.computes(stage, self.now)
                self._begin(stage, *launched)

    def _begin(self, stage: int, actor: int, act: int) -> None:
        if self.observed:
            self.memory[stage].begin(actor, act)
        self._run(self.now, self.seconds[actor], actor)
        if self.cores and self._needs_core[actor]:
            self.cores.begin(actor, self.seconds[actor], self.now)

    def _lengthen(self, actors: tuple[int, ...], more: float) -> None:
        self._push(self.now + more, actors)
        if self.cores:
            self.cores.lengthen(actors[0], more, self.now)

    def _share(self) -> None:
        """Acts have begun or ended, all of them now: the others end later or sooner."""
        if not self.cores:
            return
        ends = self.cores.ends()
        for k, (_, begun, actors) in enumerate(self.heap):
            if actors[0] in ends:
                self.heap[k] = ends[actors[0]], begun, actors
        heapq.heapify(self.heap)

    def _run(self, start: float, seconds: float, *actors: int) -> None:
        for actor in actors:
            self.began[actor] = start
        self._push(start + seconds, actors)

    def _push(self, end: float, actors: tuple[int, ...]) -> None:
        self.begun += 1
        heapq.heappush(self.heap, (end, self.begun, actors))

    def _longer(self, actor: int) -> float:
        """By how much what communicated beside an act, that should end now, makes it longer."""
        if not self._computes[actor]:
            return 0.0
        return self.traffic.longer(self.stage_of[actor], self.now)

    def _communicate(self, stage: int, actor: int, act: int) -> None:
        work = self.plan.actors[actor].work
        if self.observed:  # a message waits for its other end in memory
            self.memory[stage].begin(actor, act)
        also: tuple[int, ...] = ()
        if isinstance(work, TransferWork):
            other = self.posted.pop((work.channel, act), None)
            if other is None:
                self.posted[work.channel, act] = actor
                return
            also = (other,)
        elif not self.observed:
            axis = self.plan.queue(self.plan.actors[actor])
            self.collectives.setdefault((stage, axis), []).append((actor, act))
        seconds, spared = self.seconds[actor], 0.0
        if self.cores and self.cores.has_room(actor):
            spared = self._crowding[actor]
        start = self.traffic.take(actor, self.now, seconds, spared)
        self._run(start, seconds - spared, actor, *also)

    def _end(self, actor: int) -> bool:
        """An act has ended; True if it was the last of its step."""
        stage = self.stage_of[actor]
        rank = self.ranks[stage]
        if self._computes[actor]:
            self.computing[stage] = False
        if self.cores and self._needs_core[actor]:
            self.cores.end(actor, self.now)
        act, began = rank.acts[actor], self.began.pop(actor)
        if self.observed:
            self.memory[stage].end(actor, act)
        else:
            self.events.append(Event(stage, actor, act, began, self.now))
        rank.done(actor)
        step = act // self.acts[actor]
        self.step_ends[step] = max(self.step_ends[step], self.now)
        self.left[step] -= 1
        return not self.left[step]
