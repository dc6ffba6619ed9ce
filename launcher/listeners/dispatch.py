"""Call the listeners of a run, each in a thread of its own: nothing foreign runs in the launcher's.

A logger or a callback may raise anything, `SystemExit` included, and may block.  So the run hands
events over and continues.  A logger with 1,000 events waiting loses lines, and is named once; one
that fails is left out.  A callback loses none: where its queue is full the run waits for it
(`is_full`), and one that does not return within a limit is a hang that names it (`look`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.process.call_stack import in_one_chunk
from flowrun.launcher.listeners.listener import FAILED, RESTARTED, STOP, RunInfo
from flowrun.launcher.listeners.make import NamedListener

_QUEUED = 1000  # events that wait for a listener
_GROWTH = 3  # times the longest call before it that a call may take
_END_S = 20.0  # for a logger to end; a restart waits a quarter of that
_NEVER_S = 1e6


@dataclass(frozen=True, kw_only=True)
class Outlets:
    """The places where a listener's thread reports; each may be called in any thread.

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
    arguments: tuple[object, ...]


class _ListenerThread:
    """A listener's thread and the calls that wait for it.

    began: when the call under way began, on the monotonic clock, and the call.  longest_s: of a
    call so far.  lost_from: the step of the first event that found the queue full; late: that was
    said.  left_out: it failed, or was given up.
    """

    def __init__(self, named: NamedListener, outlets: Outlets) -> None:
        self.named, self._outlets = named, outlets
        self.calls: Queue[_Call | None] = Queue(_QUEUED)
        self.began: tuple[float, _Call] | None = None
        self.longest_s, self.late, self.left_out = 0.0, False, False
        self.lost_from: int | None = None
        name = f"listener {named.name}"
        self._thread = threading.Thread(target=in_one_chunk(self._serve), name=name, daemon=True)
        self._thread.start()

    def put(self, call: _Call) -> None:
        """Let a call wait for its turn.  That of a logger whose queue is full is lost."""
        if self.left_out:
            return
        try:
            self.calls.put_nowait(call)
        except Full:
            self.lost_from = call.step if self.lost_from is None else self.lost_from
            began = self.began
            if began is None or began[1].event != "on_start":  # else it may fail, which says more
                self._say_late()

    def quiet_s(self) -> float:
        """Return the seconds for which the call under way has not returned."""
        return time.monotonic() - self.began[0] if self.began else 0.0

    def end(self, within_s: float) -> bool:
        """Wait until all calls have returned, `within_s` at most; return whether they have."""
        until = time.monotonic() + within_s
        while self._thread.is_alive() and time.monotonic() < until:
            with suppress(Full):
                self.calls.put(None, timeout=min(0.1, within_s))
                self._thread.join(max(0.0, until - time.monotonic()))
        self.left_out = self.left_out or self._thread.is_alive()
        return not self._thread.is_alive()

    def hang(self, seconds: float) -> RunError:
        """Return the error of a callback whose call does not return."""
        at = f", {self.began[1].event} at step {self.began[1].step}" if self.began else ""
        return RunError(
            f"callback {self.named.name}{at}",
            f"it has not returned for {seconds:.0f} s.",
            "Give what takes long a thread of its own, or raise launch.hang_s.",
        )

    def give_up(self, step: int, seconds: float) -> None:
        """Say that a logger does not end, if it was not named before."""
        if not self.late:
            event = self.began[1].event if self.began else "on_end"
            self._lose(f"ends at step {step}: {event} has not returned for {seconds:.0f} s")

    def _say_late(self) -> None:
        if not self.late and self.lost_from is not None:
            self.late = True
            self._lose(f"is late: it loses lines from step {self.lost_from} on")

    def _lose(self, what: str) -> None:
        self._outlets.lose(f"the log of {self.named.name} {what}")

    def _serve(self) -> None:
        while not self.left_out and (call := self.calls.get()) is not None:
            self.began = time.monotonic(), call
            self._call(call)
            self.longest_s = max(self.longest_s, self.quiet_s())
            if call.event == "on_start" and not self.left_out:
                self._say_late()
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
            self._outlets.stop(self.named.name)

    def _fail(self, call: _Call, error: BaseException) -> None:
        self.left_out = True
        problem = f"{type(error).__name__}: {error}"
        if self.named.may_end and call.event != "on_end":
            where = f"callback {self.named.name}, {call.event} at step {call.step}"
            failed = RunError(where, problem)
            failed.__cause__ = error
            self._outlets.fail(failed)
            return
        # some add a page of advice
        self._lose(f"ends at step {call.step}: {problem.splitlines()[0]}")
        if call.event != "on_end" and (end := getattr(self.named.listener, "on_end", None)):
            with suppress(BaseException):  # it may not have started
                end(FAILED)


class Listeners:
    """The listeners of a run.

    They start with its first event: their imports and threads must not precede the fork of ranks.
    """

    def __init__(
        self,
        listeners: Sequence[NamedListener],
        describe: Callable[[], RunInfo],
        outlets: Outlets,
        limit_s: float = 0.0,
    ) -> None:
        """describe: says what they follow.  limit_s: seconds after which a callback hangs, at
        first; 0: never.
        """
        self._listeners, self._describe = list(listeners), describe
        self._outlets, self._limit_s = outlets, limit_s
        self._threads: list[_ListenerThread] = []
        self._last = 0  # step of the last event
        self.off = False  # another host calls them

    def call(self, event: str, step: int, given: Mapping[str, float] | Path) -> None:
        """Let all be called; return at once.  event: the method.  step, given: its arguments."""
        if self.off:
            return
        self._last = step
        if self._listeners and not self._threads:
            begin = _Call("on_start", step, (self._describe(),))
            self._threads = [_ListenerThread(each, self._outlets) for each in self._listeners]
            self._put(begin)
        self._put(_Call(event, step, (step, given)))

    def _put(self, call: _Call) -> None:
        for thread in self._threads:
            thread.put(call)

    @property
    def is_full(self) -> bool:
        """True if a callback is so late that the run is to wait for it."""
        return any(d.named.may_end and not d.left_out and d.calls.full() for d in self._threads)

    def look(self) -> RunError | None:
        """Return the error of a callback that hangs, once."""
        for thread in self._threads:
            limit_s = self._limit_of(thread)
            if thread.named.may_end and not thread.left_out and thread.quiet_s() > limit_s:
                thread.left_out = True
                return thread.hang(limit_s)
        return None

    def end(self, status: str) -> RunError | None:
        """End those that have started, and wait for them; the next event starts them again.
        Return the error of a callback that does not end.
        """
        hung = None
        self._put(_Call("on_end", self._last, (status,)))
        for thread in self._threads:
            within_s = _END_S / 4 if status == RESTARTED else _END_S
            if thread.named.may_end:
                within_s = self._limit_of(thread)
            if thread.left_out or thread.end(max(0.0, within_s - thread.quiet_s())):
                continue
            if thread.named.may_end:
                hung = hung or thread.hang(within_s)
            else:
                thread.give_up(self._last, within_s)
        if self._threads:
            self._listeners = [thread.named for thread in self._threads if not thread.left_out]
            self._threads.clear()
        return hung

    def _limit_of(self, thread: _ListenerThread) -> float:
        return max(self._limit_s, _GROWTH * thread.longest_s) if self._limit_s else _NEVER_S
