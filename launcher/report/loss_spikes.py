"""Loss spikes: steps whose loss is far above that of the steps before."""

from __future__ import annotations

import math
from collections.abc import Sequence

SPIKE = 3.0  # times the running mean
_SETTLED = 20  # steps before the first that counts
_DECAY = 0.95  # of the running mean: about the last 20 steps
_LISTED = 8


class LossSpikes:
    """The losses of a run so far: their running mean, and the steps that were over SPIKE times it.

    A loss that is no number counts for nothing, nor does a mean that is not over 0.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._mean = 0.0
        self._seen = 0

    def add(self, step: int, loss: float) -> None:
        """Count the loss of the next step."""
        if not math.isfinite(loss):
            return
        if self._seen >= _SETTLED and loss > SPIKE * self._mean > 0:
            self.steps.append(step)
        self._seen += 1
        share = max(1 - _DECAY, 1 / self._seen)
        self._mean += share * (loss - self._mean)


def list_steps(steps: Sequence[int]) -> str:
    """Write the first steps of a list, and how many more there are."""
    more = f" and {len(steps) - _LISTED} more" if len(steps) > _LISTED else ""
    return f"{', '.join(map(str, steps[:_LISTED]))}{more}"
