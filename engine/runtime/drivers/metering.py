"""Metering: the live bytes of a rank, counted in its first steps only because counting is slow."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes

_METERED_STEPS = 2  # the second runs as all later ones do


class Metering:
    """The count of a rank's live bytes over the first steps of its run.

    live_bytes: the torch mode under which acts run while `is_on`.
    """

    def __init__(self, variables: Iterable[torch.Tensor], wanted: bool) -> None:
        """variables: tensors that the rank holds before it begins."""
        self.live_bytes = LiveBytes(variables)
        self._wanted = wanted
        self._until: dict[int, int] = {}  # actor -> the act up to which bytes are counted

    @property
    def is_on(self) -> bool:
        """True while some actor has not done all of its acts of the first steps."""
        return bool(self._until)

    @property
    def peak(self) -> int:
        """The most bytes of tensors that were alive at once."""
        return self.live_bytes.peak

    def begin(self, scheduler: Scheduler) -> None:
        """Begin to count, if that is wanted and has not been done before."""
        if self._wanted:
            self._wanted = False
            self._until = {
                k: scheduler.acts[k] + _METERED_STEPS * acts
                for k, acts in scheduler.per_step.items()
            }

    def update(self, scheduler: Scheduler) -> None:
        """Stop counting when every actor has done the acts that are metered."""
        self._until = {k: n for k, n in self._until.items() if scheduler.acts[k] < n}
