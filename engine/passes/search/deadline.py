"""Deadline: when a search ends with the best that it has found."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """A limit of wall-clock time, in seconds from now; None: a search does not read the clock."""

    seconds: float | None = None
    _begun: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self.seconds is not None and time.monotonic() - self._begun >= self.seconds


ENDLESS = Deadline()
