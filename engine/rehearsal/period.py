"""period: a clock that repeats itself is set forward, to the last bit as if it had run.

What follows from a state is a function of it.  So where two moments differ only in time and in the
number of the micro-batch (max-plus systems of this kind become periodic: Baccelli, Cohen, Olsder
and Quadrat 1992, "Synchronization and Linearity", section 3.7), all that happens between them will
happen again, as long as no actor begins or ends a step.
"""

from __future__ import annotations

from collections import deque

from flowrun.engine.rehearsal.clock_state import ClockState, Snapshot

LONGEST = 8  # micro-batches of a period that is found; at least a round of turns


class Period:
    """Looks whenever one actor of every micro-batch, the anchor, has ended an act."""

    def __init__(self, state: ClockState) -> None:
        self.state = state
        self.often = state.often
        self.anchor = self.often[-1] if self.often else -1
        self.steps: list[int] = []
        longest = max(LONGEST, state.round)
        self.before: deque[Snapshot] = deque(maxlen=longest)
        self.under_way: deque[object] = deque(maxlen=longest)  # before: cheaper to compare

    def look(self) -> None:
        """Set the clock forward if it was in the same state some micro-batches ago."""
        state, m = self.state, self.state.plan.micro_batches
        under_way = state.under_way()
        is_first = under_way not in self.under_way
        self.under_way.append(under_way)
        if is_first:
            return
        whole = m - m % state.round  # a round that is not full has turns of its own
        acts = list(map(state.acts_of, self.often))
        steps = [count // m for count in acts]
        if steps != self.steps:
            self.before.clear()  # some actor has begun another step
        self.steps = steps
        within = [count % m for count in acts]
        if not min(within):
            self.before.clear()  # or is about to
            return
        now = state.snapshot(state.acts_of(self.anchor))
        for earlier in reversed(self.before):
            if earlier.key == now.key:
                room = (whole - 1 - max(within)) // (now.act - earlier.act)
                times = min(self._same_turns(earlier, now), room)
                if times > 0:
                    state.advance(earlier, now, times)
                    self.before.clear()
                    return
                break
        self.before.append(now)

    def _same_turns(self, earlier: Snapshot, later: Snapshot) -> int:
        """Periods for which the order of collectives, where it is fixed, repeats."""
        length, least = later.act - earlier.act, self.state.plan.micro_batches
        for rank, before, now in zip(self.state.ranks, earlier.turns, later.turns, strict=True):
            for axis, order in rank.order.items():
                each, at = now[axis] - before[axis], now[axis] % len(order)
                alike = 0
                while (
                    each
                    and at - each >= 0
                    and at + alike < len(order)
                    and order[at + alike]
                    == (order[at + alike - each][0], order[at + alike - each][1] + length)
                    and rank.repeats_due(at + alike, at + alike - each, length)
                ):
                    alike += 1
                least = min(least, alike // each) if each else least
        return least
