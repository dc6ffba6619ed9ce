"""The event loop of a run: its events, timers and tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from flowrun.launcher.ranks.failure import reason_of
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.hands.desk import Desk, Interrupted
from flowrun.launcher.supervise.life.events import LauncherFailed, TimeIsUp

_QUEUED = 2000  # events that wait, before ranks do


class Loop:
    """The events of a run: any thread posts them, and the loop's takes them.

    beaten_s: when the loop's thread last had time, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.events: asyncio.Queue[Notice] = asyncio.Queue()
        self.beaten_s = time.monotonic()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, event: Notice) -> None:
        """Let the machine take an event; any thread may call this, and a signal's handler."""
        with suppress(RuntimeError):  # the loop is closed: the run is over
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    def fail(self, error: BaseException, refused: bool = False) -> None:
        """Let the machine take what this launcher cannot continue after; any thread may call it."""
        self.post(LauncherFailed(reason_of(error), refused))

    def call(self, what: Callable[..., object], *given: Any) -> None:
        """Call something in the loop's thread, or here if it has ended."""
        try:
            self.loop.call_soon_threadsafe(what, *given)
        except RuntimeError:
            what(*given)

    @property
    def is_full(self) -> bool:
        """True while ranks should send no more."""
        return self.events.qsize() > _QUEUED

    def set_timer(self, timer: str, seconds: float) -> None:
        """Post TimeIsUp after some seconds; below 0: no longer."""
        if before := self._timers.pop(timer, None):
            before.cancel()
        if 0 <= seconds < float("inf"):
            late = partial(self.events.put_nowait, TimeIsUp(timer))
            self._timers[timer] = self.loop.call_later(seconds, late)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine while events are taken; what goes wrong is an event."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error and not isinstance(error, Interrupted):  # what interrupts is an event, too
            self.fail(error)

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def find_quiet(desk: Desk, loop: Loop) -> tuple[float, str]:
    """Return when the thread that has been quiet the longest did something; see Watch.own.

    The loop's thread does not block; what the main thread does may.
    """
    main = (desk.beaten_s, f"the launcher, {desk.works}")
    return min(main, (loop.beaten_s, f"the launcher {desk.works}".strip()))
