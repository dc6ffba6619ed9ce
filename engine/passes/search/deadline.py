"""Deadline: when a search ends with the best that it has found."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """A limit of wall-clock time.  seconds: from now; None: there is no limit, and a search does
    not depend on the clock.
    """

    seconds: float | None = None
    _begun: float = field(default_factory=time.monotonic)

    @property
    def over_s(self) -> float | None:
        """The limit, once it is over."""
        passed_s = time.monotonic() - self._begun
        return self.seconds if self.seconds is not None and passed_s >= self.seconds else None

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self.over_s is not None


ENDLESS = Deadline()
