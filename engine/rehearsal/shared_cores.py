"""SharedCores: ranks of one host, and what makes their batches ready, that are more than its cores.

Those that run at a time share the cores evenly (processor sharing): where half of the ranks wait
for a message, the others are twice as fast.  Hardware.slow_down foresees an act as if all ranks
computed all the time; here that is undone, and what the clock says counts.
"""

from __future__ import annotations

import math

from flowrun.engine.actors.plan import Actor, BoxWork, Plan, TransferWork


class SharedCores:
    """The work left of each act under way that needs a core, in seconds of a whole core."""

    def __init__(self, plan: Plan, quantum: float) -> None:
        self.core = plan.core
        self.in_thread = [actor.runs_in_thread for actor in plan.actors]
        ranks = [len(placement.ranks) for placement in plan.placements]
        self.ranks = [ranks[actor.stage] for actor in plan.actors]
        self.joined = [_count_ranks(actor, plan) for actor in plan.actors]
        self.cores = _cores(plan) * sum(ranks)
        self.quantum = quantum
        self.now = 0.0
        self.left: dict[int, float] = {}

    @staticmethod
    def are_needed(plan: Plan) -> bool:
        """Return whether more may need a core at a time than there are."""
        stages = range(len(plan.placements))
        threads = max(sum(a.runs_in_thread for a in plan.stage_actors(k)) for k in stages)
        return _cores(plan) < 1 + threads

    @property
    def rate(self) -> float:
        """The share of a core that each act under way has."""
        active = self._active()
        return min(1.0, self.cores / active) if active else 1.0

    def has_room(self, actor: int) -> bool:
        """Return whether the ranks that an act of communication joins have a core each, next to
        those that compute now.
        """
        return self._active() + self.joined[actor] <= self.cores

    def _active(self) -> int:
        return sum(self.ranks[actor] for actor in self.left)

    def begin(self, actor: int, seconds: float, now: float) -> None:
        """Begin an act.  seconds: as foreseen, with all ranks computing; what runs in a thread is
        foreseen on a whole core.
        """
        self._advance(now)
        self.left[actor] = self._whole(seconds * (1.0 if self.in_thread[actor] else self.core))

    def lengthen(self, actor: int, seconds: float, now: float) -> None:
        """Let the act of `actor` that should end `now` go on for `seconds` at the present rate."""
        self._advance(now)  # rounded down: it would else meet more of what lengthens it
        self.left[actor] = math.floor(seconds * self.rate / self.quantum) * self.quantum

    def end(self, actor: int, now: float) -> None:
        self._advance(now)
        del self.left[actor]

    def ends(self) -> dict[int, float]:
        """Return when each act ends if no other begins or ends before, by actor."""
        rate = self.rate
        return {k: self.now + self._whole(left / rate) for k, left in self.left.items()}

    def moment(self, now: float) -> tuple[object, ...]:
        return now - self.now, tuple(sorted(self.left.items()))

    def forward(self, wait: float) -> None:
        self.now += wait

    def _advance(self, now: float) -> None:
        if now > self.now:
            done = self._whole(self.rate * (now - self.now))
            self.left = {actor: max(0.0, left - done) for actor, left in self.left.items()}
            self.now = now

    def _whole(self, seconds: float) -> float:
        return round(seconds / self.quantum) * self.quantum


def _count_ranks(actor: Actor, plan: Plan) -> int:
    """Count the ranks of one group of a boxing (the others are in acts of their own), or of both
    ends of a transfer.
    """
    match actor.work:
        case BoxWork() as work:
            return plan.placements[actor.stage].shape[work.step.axis]
        case TransferWork(_, source, target):
            return sum(len(plan.placements[stage].ranks) for stage in {source, target})
    return 0


def _cores(plan: Plan) -> float:
    return plan.core if plan.core < 1 else plan.cores
