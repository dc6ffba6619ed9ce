"""SharedCores: ranks of one host, and what makes their batches ready, that are more than its cores.

Those that run at a time share the cores evenly (processor sharing): where half of the ranks wait
for a message, the others are twice as fast.  Hardware.slow_down foresees an act as if all ranks
computed all the time; here that is undone, and what the clock says counts.
"""

from __future__ import annotations

import math

from flowrun.engine.actors.plan import Actor, BoxWork, Plan, TransferWork


class SharedCores:
    """What is left of each act under way that needs a core, in seconds of a whole one."""

    def __init__(self, plan: Plan, quantum: float) -> None:
        self.core = plan.core
        self.in_thread = [actor.runs_in_thread for actor in plan.actors]
        ranks = [len(placement.ranks) for placement in plan.placements]
        self.ranks = [ranks[actor.stage] for actor in plan.actors]
        self.joined = [_joined(actor, plan) for actor in plan.actors]
        self.cores = _cores(plan) * sum(ranks)
        self.quantum = quantum
        self.now = 0.0
        self.left: dict[int, float] = {}

    @staticmethod
    def are_needed(plan: Plan) -> bool:
        """True if more may want a core at a time than there are."""
        stages = range(len(plan.placements))
        threads = max(sum(a.runs_in_thread for a in plan.stage_actors(k)) for k in stages)
        return _cores(plan) < 1 + threads

    @property
    def rate(self) -> float:
        """What each act under way has of a core."""
        active = self._active()
        return min(1.0, self.cores / active) if active else 1.0

    def has_room(self, actor: int) -> bool:
        """True if the ranks that an act of communication joins have a core each, beside those that
        compute now.
        """
        return self._active() + self.joined[actor] <= self.cores

    def _active(self) -> int:
        """Ranks that compute now."""
        return sum(self.ranks[actor] for actor in self.left)

    def begin(self, actor: int, seconds: float, now: float) -> None:
        """An act begins.  seconds: as foreseen, with all ranks computing; what runs beside them is
        foreseen on a whole core.
        """
        self._advance(now)
        self.left[actor] = self._whole(seconds * (1.0 if self.in_thread[actor] else self.core))

    def lengthen(self, actor: int, seconds: float, now: float) -> None:
        """An act that should have ended goes on, for so long at the rate of now."""
        self._advance(now)  # rounded down: it would else run beside more of what lengthens it
        self.left[actor] = math.floor(seconds * self.rate / self.quantum) * self.quantum

    def end(self, actor: int, now: float) -> None:
        """An act has ended."""
        self._advance(now)
        del self.left[actor]

    def ends(self) -> dict[int, float]:
        """When each of the acts ends, if no other begins or ends before; by actor."""
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
            self.left = {actor: max(0.0, left - done) for actor, left in self.left.items()}
            self.now = now

    def _whole(self, seconds: float) -> float:
        return round(seconds / self.quantum) * self.quantum


def _joined(actor: Actor, plan: Plan) -> int:
    """Ranks of one group of a boxing (the others are in acts of their own), or of both ends of a
    transfer.
    """
    match actor.work:
        case BoxWork() as work:
            return plan.placements[actor.stage].shape[work.step.axis]
        case TransferWork(_, source, target):
            return sum(len(plan.placements[stage].ranks) for stage in {source, target})
    return 0


def _cores(plan: Plan) -> float:
    """Of the host, for each rank."""
    return plan.core if plan.core < 1 else plan.cores
