"""Call the listeners of a run, each in a thread of its own: nothing foreign runs in the launcher's.

A logger or a callback may raise anything, `SystemExit` included, and may block.  So the run hands
events over and goes on.  A logger that is late loses lines, and is named once; one that fails is
left out.  A callback loses none: where its queue is full the run waits for it (`is_full`), and one
that does not return within a limit is a hang that names it (`look`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Full, Queue
from typing import Any

from flowrun.engine.errors import RunError
from flowrun.launcher.listeners.listener import STOP, RunInfo
from flowrun.launcher.listeners.make import NamedListener

_QUEUED = 1000  # events that wait for a listener
_GROWTH = 3  # times the longest call before it that a call may take
_END_S = 20.0  # for a logger to end; a restart waits a quarter of that
_NEVER_S = 1e6
RESTARTED = "restarted"  # the status of an end that the run continues after


@dataclass(frozen=True, kw_only=True)
class Outlets:
    """Where a listener's thread reports; each may be called in any thread.

    lose: a line about what is not written any more.  fail: the error of a callback, which ends the
    run.  stop: the name of a callback that ends the run in order.
    """

    lose: Callable[[str], None]
    fail: Callable[[RunError], None]
    stop: Callable[[str], None]


@dataclass(frozen=True)
class _Call:
    """A method of a listener, with what it is given."""

    event: str
    step: int
    given: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.given,) if self.event in ("on_start", "on_end") else (self.step, self.given)


@dataclass(kw_only=True)
class _Lane:
    """A listener's thread and the calls that wait for it.

    began: when the call under way began, on the monotonic clock, and the call.  longest_s: of a
    call so far.  lost: events that found the queue full.  left_out: it failed, or was given up.
    """

    named: NamedListener
    outlets: Outlets
    calls: Queue[_Call | None] = field(default_factory=lambda: Queue(_QUEUED))
    began: tuple[float, _Call] | None = None
    longest_s: float = 0.0
    lost: int = 0
    left_out: bool = False
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to call."""
        name = f"listener {self.named.name}"
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def put(self, call: _Call) -> None:
        """Let a call wait for its turn.  That of a logger whose queue is full is lost."""
        if self.left_out:
            return
        try:
            self.calls.put_nowait(call)
        except Full:
            if not self.lost:
                self.outlets.lose(
                    f"the log of {self.named.name} is late: it loses lines from step {call.step} on"
                )
            self.lost += 1

    def quiet_s(self, now: float) -> float:
        """Return the seconds for which the call under way has not returned."""
        return now - self.began[0] if self.began else 0.0

    def end(self, within_s: float) -> bool:
        """Wait until all calls have returned, `within_s` at most; return whether they have."""
        until = time.monotonic() + within_s
        while self.thread and self.thread.is_alive() and time.monotonic() < until:
            try:
                self.calls.put(None, timeout=min(0.1, within_s))
                self.thread.join(max(0.0, until - time.monotonic()))
            except Full:
                continue
        ended = not (self.thread and self.thread.is_alive())
        self.left_out = self.left_out or not ended
        return ended

    def where(self) -> str:
        """Name the call under way."""
        call = self.began[1] if self.began else None
        at = f", {call.event} at step {call.step}" if call else ""
        return f"callback {self.named.name}{at}"

    def _serve(self) -> None:
        while not self.left_out and (call := self.calls.get()) is not None:
            self.began = time.monotonic(), call
            self._call(call)
            self.longest_s = max(self.longest_s, self.quiet_s(time.monotonic()))
            self.began = None

    def _call(self, call: _Call) -> None:
        method = getattr(self.named.listener, call.event, None)
        if method is None:
            return
        try:
            asked = method(*call.arguments)
        except BaseException as error:  # SystemExit, a panic of Rust
            if not self.left_out:
                self._fail(call, error)
            return
        if asked == STOP and not self.left_out:
            self.outlets.stop(self.named.name)

    def _fail(self, call: _Call, error: BaseException) -> None:
        self.left_out = True
        problem = f"{type(error).__name__}: {error}"
        if self.named.may_end and call.event != "on_end":
            where = f"callback {self.named.name}, {call.event} at step {call.step}"
            failed = RunError(where, problem)
            failed.__cause__ = error
            self.outlets.fail(failed)
            return
        line = problem.partition("\n")[0]  # some add a page of advice
        self.outlets.lose(f"the log of {self.named.name} ends at step {call.step}: {line}")
        if call.event != "on_end" and (end := getattr(self.named.listener, "on_end", None)):
            with suppress(BaseException):  # it may not have started
                end("failed")


class Listeners:
    """The listeners of a run.

    They start with its first event: their imports and threads must not precede the fork of ranks.
    """

    def __init__(
        self, listeners: Sequence[NamedListener], outlets: Outlets, limit_s: float = 0.0
    ) -> None:
        """limit_s: seconds after which a callback hangs, at first; 0: never."""
        self._listeners = list(listeners)
        self._outlets, self._limit_s = outlets, limit_s
        self._describe: Callable[[], RunInfo] | None = None
        self._lanes: list[_Lane] = []
        self._last = 0  # step of the last event
        self.off = False  # another host calls them

    def prepare(self, describe: Callable[[], RunInfo]) -> None:
        """Let them start with the next event.  describe: says what they follow."""
        self._describe = describe

    def call(self, event: str, step: int, given: Mapping[str, float] | Path) -> None:
        """Let all be called; return at once.  event: the method.  step, given: its arguments."""
        if self.off:
            return
        self._last = step
        if not self._lanes and self._describe is not None:
            self._start(step, self._describe())
        for lane in self._lanes:
            lane.put(_Call(event, step, given))

    @property
    def is_full(self) -> bool:
        """True if a callback is so late that the run is to wait for it."""
        return any(d.named.may_end and not d.left_out and d.calls.full() for d in self._lanes)

    def look(self) -> RunError | None:
        """Return the error of a callback that hangs, once."""
        now = time.monotonic()
        for lane in self._lanes:
            limit_s = self._limit_of(lane)
            if lane.named.may_end and not lane.left_out and lane.quiet_s(now) > limit_s:
                lane.left_out = True
                return _hang(lane, limit_s)
        return None

    def end(self, status: str) -> RunError | None:
        """End those that have started, and wait for them; the next event starts them again.
        Return the error of a callback that does not end.
        """
        hung = None
        for lane in self._lanes:
            lane.put(_Call("on_end", self._last, status))
        for lane in self._lanes:
            within_s = _END_S / 4 if status == RESTARTED else _END_S
            if lane.named.may_end:
                within_s = self._limit_of(lane)
            if lane.left_out or lane.end(max(0.0, within_s - lane.quiet_s(time.monotonic()))):
                continue
            if lane.named.may_end:
                hung = hung or _hang(lane, within_s)
            elif not lane.lost:  # else it is named already
                where = lane.began[1].event if lane.began else "on_end"
                self._outlets.lose(
                    f"the log of {lane.named.name} ends at step {self._last}: {where} has not"
                    f" returned for {within_s:.0f} s"
                )
        self._listeners = [lane.named for lane in self._lanes if not lane.left_out] or (
            [] if self._lanes else self._listeners
        )
        self._lanes.clear()
        return hung

    def _limit_of(self, lane: _Lane) -> float:
        return max(self._limit_s, _GROWTH * lane.longest_s) if self._limit_s else _NEVER_S

    def _start(self, step: int, run: RunInfo) -> None:
        self._lanes = [_Lane(named=each, outlets=self._outlets) for each in self._listeners]
        for lane in self._lanes:
            lane.put(_Call("on_start", step, run))
            lane.start()


def _hang(lane: _Lane, seconds: float) -> RunError:
    return RunError(
        lane.where(),
        f"it has not returned for {seconds:.0f} s.",
        "Give what takes long a thread of its own, or raise launch.hang_s.",
    )
