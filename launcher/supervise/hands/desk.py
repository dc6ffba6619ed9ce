"""The desk: what the main thread does for the loop's thread, one thing after the other.

The main thread forks, plans, and reads and completes checkpoints: what may take long, or must be
done there.  It takes signals while it waits, which the loop's thread cannot.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_LOOK_S = 1.0  # a signal's handler runs between two looks, on systems that restart the wait


class Interrupted(BaseException):
    """A signal has ended what the main thread was doing; what follows is the machine's."""


class Desk:
    """Work for the main thread.

    yields_to: number of the signal, the first or the second of a kind, that interrupts what it
    does; 0: none does.  works: what it does, for a person; empty: nothing.
    """

    def __init__(self) -> None:
        self.yields_to = 0
        self.works = ""
        self.is_away = False  # it runs the ranks of a virtual cluster, and the loop works itself
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def do(self, what: str, work: Callable[[], T], yields_to: int = 0) -> T:
        """Let the main thread work, and wait for its result; called in the loop's thread.

        what: for a person.  yields_to: see above.  Raises what the work does.
        """
        if self.is_away:
            return work()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def order() -> None:
            result, error = self._try(what, work, yields_to)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_answer, answer, result, error)

        self._orders.put(order)
        return await answer

    def do_alone(self, what: str, work: Callable[[], None]) -> None:
        """Let the main thread work, while the loop's thread stands still: it holds no lock that a
        fork would copy.  Raises what the work does.
        """
        done = threading.Event()
        errors: list[BaseException] = []

        def order() -> None:
            _, error = self._try(what, work, 0)
            errors.extend([error] if error else [])
            done.set()

        self._orders.put(order)
        done.wait()
        if errors:
            raise errors[0]

    def begin(self, what: str, work: Callable[[], None], yields_to: int) -> None:
        """Let the main thread work, and do not wait; the loop continues."""
        self.is_away = True

        def order() -> None:
            self._try(what, work, yields_to)
            self.is_away = False

        self._orders.put(order)

    def serve(self) -> None:
        """Work until the desk is closed; in the main thread."""
        while True:
            with suppress(Empty, Interrupted):
                if (order := self._orders.get(timeout=_LOOK_S)) is None:
                    return
                order()

    def close(self) -> None:
        """Let the main thread go."""
        self._orders.put(None)

    def _try(self, what: str, work: Callable[[], T], yields_to: int) -> tuple[Any, Any]:
        self.works = what
        try:
            try:
                self.yields_to = yields_to
                return work(), None
            finally:
                self.yields_to = 0
                self.works = ""
        except BaseException as error:
            return None, error


def _answer(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
