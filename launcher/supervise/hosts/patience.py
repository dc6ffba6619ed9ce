"""Patience: how long others are awaited, with a line for a person every few seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_FIRST_LINE_S, _NEXT_LINE_S, _LAST_LINE_S = 2.0, 5.0, 60.0  # pauses, of which each is twice as long
_RETRY_S = 0.5


class Patience:
    """Says what is awaited, every few seconds and then every minute, until the time is up."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self._seconds, self._began = seconds, time.monotonic()
        self._until = self._began + seconds
        self._next_line, self._pause = self._began + _FIRST_LINE_S, _NEXT_LINE_S
        self._show = say

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @property
    def pause_s(self) -> float:
        """Return seconds until something is to be done."""
        return max(0.0, min(self._until, self._next_line) - time.monotonic())

    def say(self, what: str) -> None:
        """Say what is awaited, if it is time for a line."""
        if (now := time.monotonic()) >= self._next_line:
            self._show(f"{what}: {now - self._began:.0f} s of {self._seconds:g} s")
            self._next_line = now + self._pause
            self._pause = min(2 * self._pause, _LAST_LINE_S)

    async def wait(self, what: str) -> None:
        """Wait before something is tried again."""
        self.say(what)
        await asyncio.sleep(max(0.0, min(_RETRY_S, self._until - time.monotonic())))
