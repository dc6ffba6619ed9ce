"""Inbox: what a rank's loop sleeps on.

Items come from the loop's own thread and from others.  File descriptors can be watched: then the
thread that waits for an item also wakes for them, and handles what they bring itself.  So a message
of another process reaches the loop without a second thread.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

Handler = Callable[[], object]


class Inbox(Generic[T]):
    """A queue that one thread empties, and any thread may fill."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._poll = select.poll()
        self._handlers: dict[int, Handler] = {}
        self._asleep = False
        self._wakened, self._waker = socket.socketpair()
        self.watch(self._wakened.fileno(), lambda: self._wakened.recv(4096))

    def watch(self, descriptor: int, handler: Handler, write: bool = False) -> None:
        """Call the handler whenever the descriptor can be read; write: or written."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN | (select.POLLOUT if write else 0))

    def forget(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)

    def put(self, item: T) -> None:
        """Add an item, from any thread."""
        self._items.append(item)
        if self._asleep:  # read after the append: the sleeper reads the items after it has set this
            self._waker.send(b"!")

    def get(self) -> T:
        """Sleep until there is an item."""
        while not self._items:
            self.turn()
        return self._items.popleft()

    def empty(self) -> bool:
        """Handle what the descriptors bring; True if no item is there then."""
        if not self._items:
            self._handle(0)
        return not self._items

    def turn(self) -> None:
        """Sleep until a descriptor brings something, or an item is put; handle what came."""
        self._asleep = True
        try:
            self._handle(0 if self._items else None)
        finally:
            self._asleep = False

    def _handle(self, timeout: int | None) -> None:
        ready = self._poll.poll(timeout)
        self._asleep = False
        for descriptor, _ in ready:
            if handler := self._handlers.get(descriptor):
                handler()

    def close(self) -> None:
        """Let go of the descriptors; nothing may be put any more."""
        self._wakened.close()
        self._waker.close()
