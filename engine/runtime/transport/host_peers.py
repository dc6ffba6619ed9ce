"""Ranks of one host, joined by shared memory and a socket a pair.

The bytes of a message are written once, into the arena of the rank that sends, and read there.
What goes through the sockets are notifications of 16 bytes: a message is written, a slot for one is
posted, a message has been read.  They wake the loop of the other rank, which sleeps on its sockets
itself (inbox.py), not on a thread; and they end when the other rank does, whatever ended it.

Only Linux has what this needs: anonymous files in memory, and sockets with names on no disk.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator

import torch.distributed as dist

from flowrun.engine.runtime.transport.arena import Arena, OwnArena
from flowrun.engine.runtime.transport.inbox import Inbox

WRITTEN, POSTED, READ, REST = range(4)  # what a notification says of a message of a stream

Notification = Callable[[int | None], None]  # where the message starts; None: the peer has gone

_NOTIFICATION = struct.Struct("<iiq")  # what, stream, start
_RANK = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")  # of a process: its own number, its user's, its group's

AVAILABLE = sys.platform == "linux"


def listen() -> socket.socket:
    """Return a socket to which others of this machine connect, by a name that is on no disk."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel finds a name
    listener.listen(dist.get_world_size())
    return listener


def shake_hands(
    rank: int, names: dict[int, bytes], listener: socket.socket, arena: OwnArena
) -> Iterator[tuple[int, socket.socket, Arena]]:
    """Yield each other rank of the host with a socket to it, and its arena.

    names: rank of this host -> the name at which it listens.  arena: of this rank.  Raises
    ConnectionError, TimeoutError or struct.error if one of them has ended.
    """
    sockets = [socket.socket(socket.AF_UNIX) for other in names if other < rank]
    for one, name in zip(sockets, names.values(), strict=False):
        one.connect(name)
    sockets += [_accept(listener) for other in names if other > rank]
    for one in sockets:
        socket.send_fds(one, [_RANK.pack(rank)], [arena.descriptor])
    for one in sockets:
        data, descriptors, _, _ = socket.recv_fds(one, _RANK.size, 1)
        yield *_RANK.unpack(data), one, Arena.of(descriptors[0])
        os.close(descriptors[0])


def _accept(listener: socket.socket) -> socket.socket:
    """Accept a process of the same user: a socket without a file is open to all of the machine."""
    while True:
        one, _ = listener.accept()
        raw = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] == os.geteuid():
            return one
        one.close()


def machine() -> tuple[str, ...]:
    """Return what is equal for processes that can reach each other's sockets by name."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return boot.read().strip(), os.readlink("/proc/self/ns/net")


class HostPeer:
    """Another rank of this host.  arena: its memory, of which this rank reads its messages."""

    def __init__(
        self,
        link: socket.socket,
        arena: Arena,
        inbox: Inbox[tuple[int, int]],
        read: Callable[[int], None],
    ) -> None:
        """read: called with the start of a message of this rank's that the other has read."""
        self.arena = arena
        self._link = link
        self._inbox = inbox
        self._read = read
        self._gone = False
        self._rest = b""  # of a notification that came in two pieces
        self.unsent = b""  # notifications for which the socket had no room
        self._full = False
        self._came: dict[tuple[int, int], deque[int]] = {}
        self._expected: dict[tuple[int, int], deque[Notification]] = {}
        link.setblocking(False)
        inbox.watch(link.fileno(), self._handle)

    def notify(self, what: int, stream: int = 0, start: int = 0) -> None:
        """Send `what`, with the start of the message; notifications of one stream and kind arrive
        in the order sent.
        """
        if not self._gone:
            self.unsent += _NOTIFICATION.pack(what, stream, start)
            self._flush()

    def expect(self, what: int, stream: int, handler: Notification) -> None:
        """Let `handler` take the next notification of kind `what` of a stream, now or when it
        comes.
        """
        came = self._came.get((what, stream))
        if came:
            handler(came.popleft())
        elif self._gone:
            handler(None)
        else:
            self._expected.setdefault((what, stream), deque()).append(handler)

    def _handle(self) -> None:
        if self.unsent:
            self._flush()
        try:
            data = self._link.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._lose()
            return
        data = self._rest + data
        whole = len(data) // _NOTIFICATION.size * _NOTIFICATION.size
        self._rest = data[whole:]
        for what, stream, start in _NOTIFICATION.iter_unpack(data[:whole]):
            self._take(what, stream, start)

    def _take(self, what: int, stream: int, start: int) -> None:
        if what == READ:
            self._read(start)
        elif expected := self._expected.get((what, stream)):
            expected.popleft()(start)
        else:
            self._came.setdefault((what, stream), deque()).append(start)

    def _flush(self) -> None:
        """Send what can be sent; with a full socket, the rest when it has room."""
        try:
            self.unsent = self.unsent[self._link.send(self.unsent) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.unsent = b""  # what the other said before it went can still be read
        if self._full != bool(self.unsent):
            self._full = bool(self.unsent)
            self._inbox.watch(self._link.fileno(), self._handle, write=self._full)

    def _lose(self) -> None:
        self._gone, self.unsent = True, b""
        self._inbox.forget(self._link.fileno())
        expected, self._expected = self._expected, {}
        for handlers in expected.values():
            for handler in handlers:
                handler(None)

    def close(self) -> None:
        """Leave; the other finds this rank gone, if it still expects something."""
        if not self._gone:
            self._lose()
        self._link.close()
