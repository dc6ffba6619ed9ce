"""period: a clock that repeats itself is set forward, to the last bit as if it had run.

What follows from a state is a function of it.  So where two moments differ only in time and in the
number of the micro-batch (max-plus systems of this kind become periodic: Baccelli, Cohen, Olsder
and Quadrat 1992, "Synchronization and Linearity", section 3.7), all that happens between them will
happen again, as long as no actor begins or ends a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from flowrun.engine.rehearsal.clock_state import ClockState, Snapshot

LONGEST = 8  # micro-batches of a period that is found; at least a round of turns


class Period:
    """Looks whenever one actor of every micro-batch, the anchor, has ended an act.

    step_s: seconds of a step that is like the one before, once there is one.
    """

    def __init__(self, state: ClockState) -> None:
        self.state = state
        self.often = state.often
        self.anchor = self.often[-1] if self.often else -1
        self.turned = 0
        self.step_s: float | None = None
        self.places: dict[int, tuple[int, float, object]] = {}  # of a step -> act, time, key
        self.runs: dict[tuple[int, int, int, int], list[int]] = {}  # of orders
        self.before: deque[Snapshot] = deque(maxlen=max(LONGEST, state.round))

    def look(self, ended: Collection[int], whole: bool) -> bool:
        """Set the clock forward over what repeats; return whether all is as it was a step ago.

        ended: actors.  whole: the last act of a step is one of theirs.
        """
        at_anchor = self.anchor in ended
        if at_anchor:
            self._skip()
        return (whole or (at_anchor and not self.state.records)) and self._is_alike(whole)

    def _skip(self) -> None:
        """Set the clock forward if it was in the same state some micro-batches ago."""
        state, m = self.state, self.state.plan.micro_batches
        if state.turned != self.turned or state.at_start:
            self.before.clear()  # some actor has begun another step, or is about to
        self.turned = state.turned
        if state.at_start:
            return
        now = state.snapshot(state.acts_of(self.anchor))
        earlier = next((each for each in reversed(self.before) if each.key == now.key), None)
        self.before.append(now)
        if earlier:
            whole = m - m % state.round  # a round that is not full has turns of its own
            furthest = max(state.acts_of(actor) % m for actor in self.often)
            room = (whole - 1 - furthest) // (now.act - earlier.act)
            if (times := min(self._same_turns(earlier, now), room)) > 0:
                state.advance(earlier, now, times)
                self.before.clear()

    def _is_alike(self, whole: bool) -> bool:
        """Return whether all is as it was a step ago, so that all steps from there on are alike:
        at the end of a step, or where the anchor is in it.
        """
        state, m = self.state, self.state.plan.micro_batches
        done = max((k for k, left in enumerate(state.left) if not left), default=0)
        act = done * m if whole else state.acts_of(self.anchor)
        place, key = -1 if whole else act % m, state.key_of_step(act)
        before, begun, earlier = self.places.get(place, (act, 0.0, None))
        self.places[place] = act, state.now, key
        if before + m == act and earlier == key:
            self.step_s = state.now - begun
        return self.step_s is not None

    def _same_turns(self, earlier: Snapshot, later: Snapshot) -> int:
        """Periods for which the order of collectives, where it is fixed, repeats."""
        length, least = later.act - earlier.act, self.state.plan.micro_batches
        for stage, rank in enumerate(self.state.ranks):
            before, now = earlier.turns[stage], later.turns[stage]
            for axis, order in rank.order.items():
                if each := now[axis] - before[axis]:
                    alike = self._alike(stage, axis, each, length)[now[axis] % len(order)]
                    least = min(least, alike // each)
        return least

    def _alike(self, stage: int, axis: int, each: int, length: int) -> list[int]:
        """Return for how many places of an order, from each of them on, it is as `each` places
        before but `length` micro-batches later.
        """
        if (runs := self.runs.get((stage, axis, each, length))) is None:
            rank = self.state.ranks[stage]
            order = rank.order[axis]
            runs = self.runs[stage, axis, each, length] = [0] * (len(order) + 1)
            for k in reversed(range(each, len(order))):
                actor, act = order[k - each]
                if order[k] == (actor, act + length) and rank.repeats_due(k, k - each, length):
                    runs[k] = runs[k + 1] + 1
        return runs
