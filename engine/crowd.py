"""Crowd: ranks of one host that are more than its cores.

Those that compute at a time share the cores evenly (processor sharing): where half of the ranks
wait for a message, the others are twice as fast.  Hardware.slowed foresees an act as if all ranks
computed all the time; here that is undone, and what the clock says counts.
"""

from __future__ import annotations

import math

from flowrun.engine.plan import Plan


class Crowd:
    """What is left of the act of every stage that computes, in seconds of a whole core."""

    def __init__(self, plan: Plan, quantum: float) -> None:
        self.core = plan.core
        self.ranks = [len(placement.ranks) for placement in plan.placements]
        self.cores = plan.core * sum(self.ranks)
        self.quantum = quantum
        self.now = 0.0
        self.left: dict[int, float] = {}

    @property
    def rate(self) -> float:
        """What each rank that computes has of a core."""
        active = sum(self.ranks[stage] for stage in self.left)
        return min(1.0, self.cores / active) if active else 1.0

    def begin(self, stage: int, seconds: float, now: float) -> None:
        """An act begins.  seconds: as foreseen, with all ranks computing."""
        self._advance(now)
        self.left[stage] = self._whole(seconds * self.core)

    def lengthen(self, stage: int, seconds: float, now: float) -> None:
        """An act that should have ended goes on, for so long at the rate of now."""
        self._advance(now)  # rounded down: it would else run beside more of what lengthens it
        self.left[stage] = math.floor(seconds * self.rate / self.quantum) * self.quantum

    def end(self, stage: int, now: float) -> None:
        """An act has ended."""
        self._advance(now)
        del self.left[stage]

    def ends(self) -> dict[int, float]:
        """When each of the acts ends, if no other begins or ends before; by stage."""
        rate = self.rate
        return {k: self.now + self._whole(left / rate) for k, left in self.left.items()}

    def moment(self, now: float) -> tuple[object, ...]:
        """All that decides what follows, seen from now."""
        return now - self.now, tuple(sorted(self.left.items()))

    def forward(self, wait: float) -> None:
        """As if so much time had gone by and all else were as it is."""
        self.now += wait

    def _advance(self, now: float) -> None:
        if now > self.now:
            done = self._whole(self.rate * (now - self.now))
            self.left = {stage: max(0.0, left - done) for stage, left in self.left.items()}
            self.now = now

    def _whole(self, seconds: float) -> float:
        return round(seconds / self.quantum) * self.quantum
