"""LinkTraffic: the bytes under way between stages and ranks, on the clock's links.

A rank has links at each level of the network (network.py).  Messages between stages go out over one
and in over another, for bytes a second are those of each direction.  A collective takes both.
Messages between stages overtake collectives: they have streams of their own, and the next stage
waits for them, while gradients are waited for at the end of a step.  A collective that is overtaken
ends later by as much.  What crosses different levels runs side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from flowrun.engine.actors.plan import BoxWork, Plan, TransferWork

Transmission = tuple[float, float, float]  # counted up to (s), ends (s), share of compute taken


class Route(NamedTuple):
    """The links that an actor's bytes take: out of one, into one; around: both, as a collective.

    taken: share of compute that it takes on these stages while it runs.
    """

    out: int
    into: int
    around: bool
    taken: float
    stages: tuple[int, ...]


class LinkTraffic:
    """The links of each stage and level: when they are free, and what is under way on them.

    out, into, around: the time in seconds at which each link is free.
    under_way: the transmissions of each stage that may slow the act that computes there.
    quantum: every time is a multiple of it (clock_state.ActTable).
    """

    def __init__(self, plan: Plan, quantum: float) -> None:
        self.quantum = quantum
        levels = 1 + max((actor.level for actor in plan.actors), default=0)
        places = range(len(plan.placements) * levels)
        self.out, self.into, self.around = ([0.0 for _ in places] for _ in range(3))
        self.under_way: list[list[Transmission]] = [[] for _ in plan.placements]
        self._routes: dict[int, Route] = {}
        for actor in plan.actors:
            if isinstance(actor.work, BoxWork):
                ends = (actor.stage, actor.stage)
            elif isinstance(actor.work, TransferWork):
                ends = (actor.work.source_stage, actor.work.target_stage)
            else:
                continue
            out, into = (stage * levels + actor.level for stage in ends)
            around = isinstance(actor.work, BoxWork)
            stages = tuple(sorted({*ends})) if actor.taken else ()
            self._routes[actor.id] = Route(out, into, around, actor.taken, stages)

    def take(self, actor: int, now: float, seconds: float, spared: float = 0.0) -> float:
        """Occupy the links of an act of communication that asks for them now; return when it
        begins.

        spared: seconds that it does not wait this time; the compute that it takes, it takes in what
        is left.
        """
        out, into, around, taken, stages = self._routes[actor]
        if spared:
            taken = min(1.0, taken * seconds / (seconds - spared)) if seconds > spared else 0.0
            seconds -= spared
        start = max(now, self.out[out], self.into[into])
        if around:
            start = max(start, self.around[out])
            self.around[out] = start + seconds
        else:
            self.out[out] = self.into[into] = start + seconds
            for place in (out, into):
                if self.around[place] > start:
                    self.around[place] += seconds
        for stage in stages:
            self.under_way[stage].append((start, start + seconds, taken))
        return start

    def computes(self, stage: int, now: float) -> None:
        """Begin an act of compute: what went before took nothing from it."""
        self._forget(stage, now)

    def longer(self, stage: int, now: float) -> float:
        """Return the seconds by which transmissions delay the end of an act that should end now.

        While it is delayed they slow it further; those that begin later count at the next call.
        """
        if not self.under_way[stage]:
            return 0.0
        sent = [(since - now, to - now, k) for since, to, k in self.under_way[stage]]
        edges = sorted({0.0, *(t for since, to, _ in sent for t in (since, to))})
        before = [t for t in edges if t <= 0]
        lost = sum((to - since) * _compute_share(sent, since) for since, to in pairwise(before))
        if lost <= 0:
            return 0.0
        end = 0.0  # all from now on: what repeats later is the same to the last bit
        for until in edges[len(before) :]:
            rate = 1 - _compute_share(sent, end)
            if rate * (until - end) >= lost:
                break
            lost -= rate * (until - end)
            end = until
        else:
            rate = 1.0
        more = round((end + lost / rate) / self.quantum) * self.quantum
        self._forget(stage, now + more)
        return more

    def _forget(self, stage: int, before: float) -> None:
        if sent := self.under_way[stage]:
            self.under_way[stage] = [(max(s, before), to, k) for s, to, k in sent if to > before]

    def moment(self, now: float) -> tuple[object, ...]:
        """Return all that decides what follows, with times counted from now."""
        sent_now = [
            (stage, *[(since - now, to - now, k) for since, to, k in sent])
            for stage, sent in enumerate(self.under_way)
            if sent
        ]
        free = [max(0.0, t - now) for t in (*self.out, *self.into, *self.around)]
        return tuple(free), tuple(sent_now)

    def forward(self, wait: float) -> None:
        for free in (self.out, self.into, self.around):
            free[:] = [time + wait for time in free]
        self.under_way = [[(s + wait, t + wait, k) for s, t, k in each] for each in self.under_way]


def _compute_share(sent: Iterable[Transmission], at: float) -> float:
    """Return the share of compute that transmissions take at a moment: the largest.  18.9 % is the
    mean of trainings in which collectives of several kinds ran at once, and 40 % the most (arXiv
    2507.03114): no sum.
    """
    return max((k for since, to, k in sent if since <= at < to), default=0.0)
