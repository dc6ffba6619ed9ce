"""The desk: what the main thread does for the loop's thread, one thing after the other.

The main thread forks, plans, and reads and completes checkpoints: what may take long, or must be
done there.  It takes signals while it waits, which the loop's thread cannot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
_LOOK_S = 1.0  # a signal's handler runs between two looks, on systems that restart the wait


class Interrupted(BaseException):
    """A signal has ended what the main thread was doing; what follows is the machine's."""


class Desk:
    """Work for the main thread.

    yields_to: what interrupts it: 1: any signal that asks for the end; 2: one that asks for it at
    once; 0: none.  works: what it does, for a person; empty: nothing.  began_s: when it began to,
    on the monotonic clock.
    """

    def __init__(self) -> None:
        self.yields_to = 0
        self.works = ""
        self.began_s = 0.0
        self.is_away = False  # it runs the ranks of a virtual cluster, and the loop works itself
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def do(self, what: str, work: Callable[[], T], yields_to: int = 0) -> T:
        """Let the main thread work, and wait for its result; called in the loop's thread.  Raises
        what the work does.
        """
        if self.is_away:
            return work()
        return await asyncio.wrap_future(self._order(what, work, yields_to))

    def do_alone(self, what: str, work: Callable[[], None]) -> None:
        """Let the main thread work, while the loop's thread stands still: it holds no lock that a
        fork would copy.  Raises what the work does.
        """
        self._order(what, work, 0).result()

    def begin(self, what: str, work: Callable[[], None], yields_to: int) -> None:
        """Let the main thread work, and do not wait; the loop continues."""
        self.is_away = True
        self._order(what, work, yields_to).add_done_callback(self._come_back)

    def _come_back(self, _: Future[None]) -> None:
        self.is_away = False

    @property
    def beaten_s(self) -> float:
        """When the work under way began; now, if there is none or the loop works itself."""
        return self.began_s if self.works and not self.is_away else time.monotonic()

    def serve(self) -> None:
        """Work until the desk is closed; in the main thread."""
        while True:
            with suppress(Empty, Interrupted):
                if (order := self._orders.get(timeout=_LOOK_S)) is None:
                    return
                order()

    def close(self) -> None:
        self._orders.put(None)

    def _order(self, what: str, work: Callable[[], T], yields_to: int) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()

        def order() -> None:
            self.began_s, self.works = time.monotonic(), what
            try:
                try:
                    self.yields_to = yields_to
                    result = work()
                finally:
                    self.yields_to = 0
                    self.works = ""
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self._orders.put(order)
        return answer
