"""Signals and launch.time_limit: what asks a run to end, or to save.

Until ranks run there is nothing to save, and a request to end raises its error at once.  While the
machine is in charge it is an event; a second signal of a kind, as SIGQUIT or SIGHUP do, ends the
run at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.hands.desk import Desk, Interrupted
from flowrun.launcher.supervise.life.events import Asked
from flowrun.launcher.supervise.life.verdicts import CTRL_C, WARNING
from flowrun.launcher.terminal.doing import clear
from flowrun.launcher.terminal.exit_status import PREEMPTED

_TWICE_S = 1.0  # timeout(1) and some schedulers signal a process and its group: that is once
SIGNALS: Mapping[int, Asked] = {
    signal.SIGTERM: Asked("SIGTERM"),
    signal.SIGUSR2: Asked(WARNING),  # Slurm's, as submitit asks for it
    signal.SIGINT: Asked(CTRL_C),
    signal.SIGUSR1: Asked("SIGUSR1", ends=0),
}
_STRIKES = (signal.SIGQUIT, signal.SIGHUP)  # as a second signal of a kind
_USED = (signal.SIGUSR1, *_STRIKES)  # by others, maybe: then they have no use here


class Preempted(SystemExit):
    """The end of a run that was asked to end and has lost nothing."""

    def __init__(self, by: str) -> None:
        super().__init__(PREEMPTED)
        self.by = by


class Signals:
    """The signals to this process while it trains.

    limit_s: of launch.time_limit, from now on; None: no limit.  deadline: when it is over, on the
    monotonic clock.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.deadline = None if limit_s is None else time.monotonic() + limit_s
        self._post: Callable[[Notice], None] | None = None
        self._desk: Desk | None = None
        self._process = os.getpid()
        self._first: dict[int, float] = {}  # signal -> when it came first

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle signals, but for those that are ignored (nohup) or that another has use for."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*SIGNALS, *_STRIKES)}
        for number, handler in before.items():
            used = number in _USED and handler is not signal.SIG_DFL
            if not used and handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def posting(self, post: Callable[[Notice], None], desk: Desk) -> Iterator[None]:
        """Within, signals are events.  desk: what the main thread does, which one may interrupt."""
        self._post, self._desk = post, desk
        try:
            yield
        finally:
            self._post = self._desk = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # one just forked; its launcher ends it
        if self._post is None or self._desk is None:
            self._end(number)
            return
        now = time.monotonic()
        asked = SIGNALS.get(number) or Asked(signal.Signals(number).name, again=True)
        first = self._first.setdefault(number, now)
        again = asked.again or (asked.ends > 0 and now - first >= _TWICE_S)
        if first == now or again or not asked.ends:
            self._post(replace(asked, again=again))
            if asked.ends and 0 < self._desk.yields_to <= 1 + again:
                self._desk.yields_to = 0
                raise Interrupted

    def _end(self, number: int) -> None:
        if number in _STRIKES:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif (asked := SIGNALS[number]).ends:
            clear()
            raise KeyboardInterrupt if asked.by == CTRL_C else Preempted(asked.by)
