"""Clock: all stages of a plan on one virtual clock.

One rank stands for all ranks of its stage (they differ only by coordinate), so the cost is flat in
the number of ranks.  A rank computes one act at a time; its collectives and messages share one link
and run beside, and so does what makes batches ready, each actor on a core of its own.  A transfer
ends when both ends have posted it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from flowrun.engine.cost.live import Live
from flowrun.engine.deadlock import deadlock
from flowrun.engine.period import Period, steady
from flowrun.engine.plan import BOX, RECEIVE, SEND, Actor, Plan, TransferWork
from flowrun.engine.scheduler import Scheduler

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
    return actor.kind not in (BOX, SEND, RECEIVE) and not actor.beside


def exact_seconds(plan: Plan, cost: Callable[[Actor], float]) -> list[float]:
    """Of an act of each actor, rounded so that all sums of a few steps are exact: what happens
    again, happens at the same distance, to the last bit.
    """
    seconds = [cost(actor) for actor in plan.actors]
    acts = map(plan.acts_per_step, plan.actors)
    total = sum(each * n for each, n in zip(seconds, acts, strict=True))
    quantum = math.ldexp(1.0, math.frexp(total)[1] - _DIGITS)
    return [round(each / quantum) * quantum for each in seconds]


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
        self.seconds = exact_seconds(plan, cost)
        self.steps = steps
        self.observed = observed
        last = steps + (_AHEAD if observed else 0)
        self.ranks = [Scheduler(plan, stage, last) for stage in range(len(plan.placements))]
        self.now = 0.0
        self.computing = [False] * len(self.ranks)
        self.link_free = [0.0] * len(self.ranks)
        self.posted: dict[tuple[int, int], int] = {}  # (channel, act) -> the actor that waits
        self.heap: list[tuple[float, int, tuple[int, ...]]] = []
        self.begun = 0  # acts and transfers so far: what ends at once, ends in this order
        self.events: list[Event] = []
        self.collectives: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.step_ends = [0.0] * last
        self.left = [sum(map(plan.acts_per_step, plan.actors))] * last  # acts of each step
        self.memory = [Live(plan, stage) for stage in range(len(self.ranks))] if observed else []
        self._computes = [computes(actor) for actor in plan.actors]
        self.stage_of = [actor.stage for actor in plan.actors]
        self.acts = list(map(plan.acts_per_step, plan.actors))
        self.period = Period(self) if shortly else None

    def run(self) -> None:
        """To the end, or until steps repeat; or PlanError."""
        self._start(range(len(self.ranks)))
        period, before = self.period, None
        while self.heap:
            self.now, _, actors = heapq.heappop(self.heap)
            whole = False
            for actor in actors:
                whole |= self._end(actor)
            self._start(sorted({self.stage_of[actor] for actor in actors}))
            if whole and self.observed and not self.left[self.steps - 1]:
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
        """(stage, axis) -> collectives as they were issued."""
        return tuple((group, tuple(acts)) for group, acts in sorted(self.collectives.items()))

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
                self._begin(stage, *launched)

    def _begin(self, stage: int, actor: int, act: int) -> None:
        if self.observed:
            self.memory[stage].begin(actor, act)
        self._run(actor, act, self.now)

    def _run(self, actor: int, act: int, start: float, also: tuple[int, ...] = ()) -> None:
        end = start + self.seconds[actor]
        if not self.observed:
            for each in (actor, *also):
                self.events.append(Event(self.stage_of[each], each, act, start, end))
        self.begun += 1
        heapq.heappush(self.heap, (end, self.begun, (actor, *also)))

    def _communicate(self, stage: int, actor: int, act: int) -> None:
        work = self.plan.actors[actor].work
        if self.observed:  # a message waits for its other end in memory
            self.memory[stage].begin(actor, act)
        if isinstance(work, TransferWork):
            other = self.posted.pop((work.channel, act), None)
            if other is None:
                self.posted[work.channel, act] = actor
                return
            ends = (stage, self.stage_of[other])
            start = max(self.now, *(self.link_free[s] for s in ends))
            self._run(actor, act, start, (other,))
            for s in ends:
                self.link_free[s] = start + self.seconds[actor]
            return
        if not self.observed:
            axis = work.step.axis  # type: ignore[union-attr]
            self.collectives.setdefault((stage, axis), []).append((actor, act))
        start = max(self.now, self.link_free[stage])
        self._run(actor, act, start)
        self.link_free[stage] = start + self.seconds[actor]

    def _end(self, actor: int) -> bool:
        """An act has ended; True if it was the last of its step."""
        stage = self.stage_of[actor]
        rank = self.ranks[stage]
        if self._computes[actor]:
            self.computing[stage] = False
        act = rank.acts[actor]
        if self.observed:
            self.memory[stage].end(actor, act)
        rank.done(actor)
        step = act // self.acts[actor]
        self.step_ends[step] = max(self.step_ends[step], self.now)
        self.left[step] -= 1
        return not self.left[step]
