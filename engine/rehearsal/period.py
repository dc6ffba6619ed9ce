"""period: a clock that repeats itself is set forward, to the last bit as if it had run.

What follows from a state is a function of it.  So where two moments differ only in time and in the
number of the micro-batch (max-plus systems of this kind become periodic: Baccelli, Cohen, Olsder
and Quadrat 1992, "Synchronization and Linearity", section 3.7), all that happens between them will
happen again, as long as no actor begins or ends a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrun.engine.rehearsal.clock import Clock

LONGEST = 8  # micro-batches of a period that is found; at least a round of turns
ClockState = tuple[Any, ...]


def state(clock: Clock, act: int, step: int) -> ClockState:
    """All that decides what follows, seen from now and from micro-batch `act` of step `step`."""
    now = clock.now
    since = [act if n > 1 else step for n in clock.acts]
    return (
        act % clock.round,
        tuple((end - now, actors) for end, _, actors in sorted(clock.heap)),
        clock.traffic.moment(now),
        clock.cores.moment(now) if clock.cores else (),
        tuple(clock.computing),
        frozenset((c, a - since[actor], actor) for (c, a), actor in clock.posted.items()),
        tuple(rank.moment(since) for rank in clock.ranks),
        tuple(memory.moment() for memory in clock.memory),
    )


def steady(clock: Clock) -> ClockState:
    """The state when a step is whole, seen from that step."""
    step = max(k for k, left in enumerate(clock.left) if not left)
    turns = tuple(
        count - step * len(rank.order[axis])
        for rank in clock.ranks
        for axis, count in rank.issued.items()
    )
    return (*state(clock, step * clock.plan.micro_batches, step), turns)


@dataclass(frozen=True, slots=True)
class _Moment:
    """What the clock was when the anchor ended an act.

    events, collectives, turns: how many were written down, and taken.
    """

    found: ClockState
    act: int
    now: float
    begun: int
    events: int
    collectives: dict[tuple[int, int], int]
    turns: list[dict[int, int]]


class Period:
    """Looks whenever one actor of every micro-batch, the anchor, has ended an act."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.often = [k for k, n in enumerate(clock.acts) if n > 1]
        self.anchor = self.often[-1] if self.often else -1
        self.steps: list[int] = []
        self.before: deque[_Moment] = deque(maxlen=max(LONGEST, clock.round))

    def look(self) -> None:
        """Set the clock forward if it was in the same state some micro-batches ago."""
        clock, m = self.clock, self.clock.plan.micro_batches
        whole = m - m % clock.round  # a round that is not full has turns of its own
        acts = [clock.ranks[clock.stage_of[k]].acts[k] for k in self.often]
        steps = [count // m for count in acts]
        if steps != self.steps:
            self.before.clear()  # some actor has begun another step
        self.steps = steps
        within = [count % m for count in acts]
        if not min(within):
            self.before.clear()  # or is about to
            return
        moment = self._moment(clock.ranks[clock.stage_of[self.anchor]].acts[self.anchor])
        for earlier in reversed(self.before):
            if earlier.found == moment.found:
                length = moment.act - earlier.act
                room = (whole - 1 - max(within)) // length
                times = min(self._same_turns(earlier, moment), room)
                if times > 0:
                    self._forward(earlier, moment, times)
                    self.before.clear()
                    return
                break
        self.before.append(moment)

    def _moment(self, act: int) -> _Moment:
        clock = self.clock
        return _Moment(
            state(clock, act, 0),
            act,
            clock.now,
            clock.begun,
            len(clock.events),
            {group: len(acts) for group, acts in clock.collectives.items()},
            [dict(rank.issued) for rank in clock.ranks],
        )

    def _same_turns(self, earlier: _Moment, moment: _Moment) -> int:
        """Periods for which the order of collectives, where it is fixed, goes on alike."""
        length, least = moment.act - earlier.act, self.clock.plan.micro_batches
        for rank, before, now in zip(self.clock.ranks, earlier.turns, moment.turns, strict=True):
            for axis, order in rank.order.items():
                each, at = now[axis] - before[axis], now[axis] % len(order)
                alike = 0
                while (
                    each
                    and at - each >= 0
                    and at + alike < len(order)
                    and order[at + alike]
                    == (order[at + alike - each][0], order[at + alike - each][1] + length)
                ):
                    alike += 1
                least = min(least, alike // each) if each else least
        return least

    def _forward(self, earlier: _Moment, moment: _Moment, times: int) -> None:
        """As if `times` periods more had gone by."""
        clock, acts = self.clock, moment.act - earlier.act
        length, more = moment.now - earlier.now, times * (moment.act - earlier.act)
        wait = times * length
        again = clock.events[earlier.events : moment.events]
        for k in range(1, times + 1):
            clock.events += [
                type(e)(
                    e.stage, e.actor, e.act + k * acts, e.start + k * length, e.end + k * length
                )
                for e in again
            ]
        for group, issued in clock.collectives.items():
            repeated = issued[earlier.collectives.get(group, 0) : moment.collectives[group]]
            for k in range(1, times + 1):
                issued += [(actor, act + k * acts) for actor, act in repeated]
        clock.now += wait
        clock.heap = [(end + wait, n, actors) for end, n, actors in clock.heap]
        clock.traffic.forward(wait)
        if clock.cores:
            clock.cores.forward(wait)
        clock.began = {actor: began + wait for actor, began in clock.began.items()}
        often = set(self.often)
        clock.posted = {
            (c, act + (more if actor in often else 0)): actor
            for (c, act), actor in clock.posted.items()
        }
        for step in self.steps:
            clock.left[step] -= more
        for rank, before, now in zip(clock.ranks, earlier.turns, moment.turns, strict=True):
            turns = {axis: times * (now[axis] - before[axis]) for axis in now}
            rank.forward(more, turns)
        for memory in clock.memory:
            memory.forward(more)
