"""Call the listeners of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrun.engine.errors import RunError
from flowrun.launcher.listeners.listener import STOP, RunInfo
from flowrun.launcher.listeners.make import NamedListener


class Listeners:
    """The listeners of a run.

    They start with its first event: their imports and threads must not precede the fork of ranks.
    A logger that fails is ended as failed and left out, and the training goes on; a callback that
    fails ends the run.
    """

    def __init__(self, listeners: Sequence[NamedListener], lose: Callable[[str], None]) -> None:
        """lose: takes a line about what is not written any more."""
        self._listeners = list(listeners)
        self._lose = lose
        self._describe: Callable[[], RunInfo] | None = None
        self._started: list[NamedListener] = []
        self._last = 0  # step of the last event
        self.off = False  # another host calls them

    def prepare(self, describe: Callable[[], RunInfo]) -> None:
        """Let them start with the next event.  describe: says what they follow."""
        self._describe = describe

    def call(self, event: str, step: int, given: Mapping[str, float] | Path) -> str:
        """Call all; return the name of the one that asks to stop, or nothing.

        event: the method.  step: its first argument.  given: its second.  Raises RunError.
        """
        if self.off:
            return ""
        self._start(step)
        started = list(self._started)  # one that fails is taken out
        asks = [each.name for each in started if self._call(each, event, step, given) == STOP]
        return asks[0] if asks else ""

    def end(self, status: str) -> None:
        """End those that have started; the next event starts them again."""
        for each in list(self._started):
            self._call(each, "on_end", self._last, status)
        self._started.clear()

    def _start(self, step: int) -> None:
        self._last = step
        if self._started or self._describe is None:
            return
        run = self._describe()
        self._started = list(self._listeners)
        for each in list(self._started):
            self._call(each, "on_start", step, run)

    def _call(self, named: NamedListener, event: str, step: int, given: Any) -> Any:
        method = getattr(named.listener, event, None)
        if method is None:
            return None
        arguments = (given,) if event in ("on_start", "on_end") else (step, given)
        try:
            return method(*arguments)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if named.may_end and event != "on_end":
                raise RunError(f"callback {named.name}, {event} at step {step}", problem) from error
            self._listeners.remove(named)
            self._started.remove(named)
            if event != "on_end":
                with suppress(Exception):  # it may have none, or not have started
                    named.listener.on_end("failed")
            line = problem.partition("\n")[0]  # some add a page of advice
            self._lose(f"the log of {named.name} ends at step {step}: {line}")
        return None
