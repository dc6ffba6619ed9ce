"""The lines of steps where there is no terminal: when one is due, what it says; lists of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flowrun.launcher.report.report import StepRecord
from flowrun.launcher.terminal.units import duration

_SHORTEST_S, _LONGEST_S = 10, 60  # between lines; from one to the other in the first ten minutes
_LISTED = 8  # steps of a list
_NEWEST = 0.1  # share of the newest step in the mean that is shown


class SmoothSpeed:
    """A mean of speeds and times in which the newest steps count most."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._inverse = 0.0  # seconds of a unit of work

    def add(self, record: StepRecord) -> float:
        """Add a step; return the units of work in a second."""
        inverse = 1 / record.speed if record.speed > 0 else self._inverse
        share = _NEWEST if self.step_s else 1.0
        self.step_s += share * (record.step_s - self.step_s)
        self._inverse += share * (inverse - self._inverse)
        return 1 / self._inverse if self._inverse else 0.0


class StepLines:
    """A line for a tenth of the run, and after 10 s to 60 s without one; the last step has one.

    steps: of the run.  every: steps from one line to the next, in place of that; 0: as said.
    unit: of speed.  clock: seconds since 1970.
    """

    def __init__(
        self, steps: int, every: int, unit: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.steps, self.every, self.unit = steps, every, unit
        self._clock, self._speed = clock, SmoothSpeed()
        self._began = self._last = clock()

    def line(self, record: StepRecord, rate: float) -> str | None:
        """Return the line of a step; None: it has none.  rate: of learning."""
        speed, now = self._speed.add(record), self._clock()
        if not self._is_due(record.step, now):
            return None
        self._last = now
        left = self.steps - 1 - record.step
        parts = (
            time.strftime("%H:%M:%S", time.localtime(now)),
            f"step {record.step}/{self.steps}",
            f"loss {record.loss:.4f}",
            f"lr {rate:.3g}",
            f"{speed:,.0f} {self.unit}/s",
            f"{duration(left * self._speed.step_s)} left" if left else "",
        )
        return "  ".join(filter(None, parts))

    def _is_due(self, step: int, now: float) -> bool:
        if step == self.steps - 1:
            return True
        if self.every:
            return step % self.every == 0
        pause = min(_LONGEST_S, max(_SHORTEST_S, (now - self._began) / 10))
        return step % max(1, self.steps // 10) == 0 or now - self._last >= pause


def list_steps(steps: Sequence[int]) -> str:
    """Write the first steps of a list, and how many more there are."""
    more = f" and {len(steps) - _LISTED} more" if len(steps) > _LISTED else ""
    return f"{', '.join(map(str, steps[:_LISTED]))}{more}"
