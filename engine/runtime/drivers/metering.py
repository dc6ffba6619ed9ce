"""Metering: the live bytes of a rank, counted in the first steps of its run alone: it is slow."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes

_METERED_STEPS = 2  # the second runs as all later ones do


class Metering:
    """Whether live bytes are counted now, and the count.

    live_bytes: the mode to run acts under while `is_on`.
    """

    def __init__(self, variables: Iterable[torch.Tensor], wanted: bool) -> None:
        """variables: what the rank holds before it begins.  wanted: False to count nothing."""
        self.live_bytes = LiveBytes(variables)
        self._wanted = wanted
        self._until: dict[int, int] = {}  # actor -> the act up to which bytes are counted

    @property
    def is_on(self) -> bool:
        """True while some actor has an act of the first steps before it."""
        return bool(self._until)

    @property
    def peak(self) -> int:
        """The most bytes of tensors that were alive at once."""
        return self.live_bytes.peak

    def begin(self, scheduler: Scheduler) -> None:
        """Count from now on, if this is wanted and has not been done before."""
        if self._wanted:
            self._wanted = False
            self._until = {
                k: scheduler.acts[k] + _METERED_STEPS * acts
                for k, acts in scheduler.per_step.items()
            }

    def update(self, scheduler: Scheduler) -> None:
        """Stop counting when every actor has done the acts that are metered."""
        self._until = {k: n for k, n in self._until.items() if scheduler.acts[k] < n}
