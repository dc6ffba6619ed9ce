"""Stragglers: ranks that take longer than others that do the same, found by what they do not wait.

All ranks of a stage run the same acts.  One that is slower than its peers is waited for, and waits
less itself: the difference is what it costs a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from flowrun.engine.actors.plan import Plan

LEAST_SHARE = 0.1  # of a step: what is less is noise


class Straggler(NamedTuple):
    """A slow rank, and the seconds of each step that its peers wait longer than it does."""

    rank: int
    lost_s: float
    step_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slower than its peers, which do the same: they wait"
            f" {self.lost_s * 1e3:,.0f} ms longer in a step of {self.step_s * 1e3:,.0f} ms"
            f" ({self.lost_s / self.step_s:.0%})"
        )


def find_straggler(plan: Plan, waited_s: Mapping[int, float], step_s: float) -> Straggler | None:
    """Return the rank that costs a step most, if it costs a tenth of it.

    waited_s: seconds of a step for which ranks wait for others; of any ranks.
    """
    losses = []
    for placement in plan.placements:
        here = [rank for rank in placement.ranks if rank in waited_s]
        for rank in here:
            if peers := [waited_s[other] for other in here if other != rank]:
                losses.append((statistics.median(peers) - waited_s[rank], rank))
    lost_s, rank = max(losses, default=(0.0, 0))
    return Straggler(rank, lost_s, step_s) if lost_s > LEAST_SHARE * step_s > 0 else None
