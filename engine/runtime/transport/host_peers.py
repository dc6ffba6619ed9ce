"""HostPeers: the ranks of one host, joined by shared memory and a socket a pair.

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
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrun.engine.runtime.transport.arena import Arena, OwnArena
from flowrun.engine.runtime.transport.inbox import Inbox
from flowrun.engine.runtime.transport.pending import PeerGone

WRITTEN, POSTED, _READ, _REST = range(4)  # what a notification says of a message of a stream

Notification = Callable[[int | None], None]  # where the message starts; None: the peer has gone

_NOTIFICATION = struct.Struct("<iiq")  # what, stream, start
_RANK = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")  # of a process: its own number, its user's, its group's

AVAILABLE = sys.platform == "linux"


class HostPeers:
    """The other ranks of a rank's host: sockets to them, and their arenas."""

    def __init__(self, inbox: Inbox[tuple[int, int]]) -> None:
        """inbox: of the rank's loop; it handles what comes."""
        self.inbox = inbox
        self.arena: OwnArena | None = None
        self._hosts: dict[tuple[str, ...], list[int]] = {}
        self._peers: dict[int, _PeerSocket] = {}
        self._readers: dict[int, int] = {}  # start -> ranks that have yet to read what lies there

    def meet(self, rank: int, host: str) -> None:
        """Connect to the ranks that name the same host; every rank of every host has to call it.

        host: ranks of one machine may still name different ones.
        """
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # the kernel finds a name; it is on no disk
            listener.listen(dist.get_world_size())
            met: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(met, ((host, *_machine()), listener.getsockname()))
            for k, (where, _) in enumerate(met):
                self._hosts.setdefault(where, []).append(k)
            here = self._hosts[met[rank][0]]
            if len(here) > 1:
                try:
                    self._shake_hands(rank, here, listener, [name for _, name in met])
                except (ConnectionError, TimeoutError, struct.error) as error:
                    raise PeerGone(f"a rank of this host has ended: {error}") from error

    def _shake_hands(
        self, rank: int, here: list[int], listener: socket.socket, names: list[bytes]
    ) -> None:
        """Connect a socket to each other rank; exchange descriptors of the arenas over it."""
        self.arena = OwnArena(len(here))
        sockets = [socket.socket(socket.AF_UNIX) for other in here if other < rank]
        for one, other in zip(sockets, here, strict=False):
            one.connect(names[other])
        sockets += [_accept(listener) for other in here if other > rank]
        for one in sockets:
            socket.send_fds(one, [_RANK.pack(rank)], [self.arena.descriptor])
        for one in sockets:
            data, descriptors, _, _ = socket.recv_fds(one, _RANK.size, 1)
            (other,) = _RANK.unpack(data)
            self._peers[other] = _PeerSocket(
                other, one, Arena(descriptors[0]), self.inbox, self.read_own
            )
            os.close(descriptors[0])

    def are_together(self, ranks: Sequence[int]) -> bool:
        """True if these ranks are on one host, whichever: all ranks answer alike."""
        return any(set(ranks).issubset(here) for here in self._hosts.values())

    def write(self, num_bytes: int, readers: int = 1) -> int:
        """Take a piece of this rank's arena that `readers` ranks will read; return its start."""
        assert self.arena is not None
        start = self.arena.take(num_bytes)
        self._readers[start] = readers
        return start

    def keep(self, num_bytes: int) -> int:
        """Take a piece of this rank's arena for good; return its start."""
        assert self.arena is not None
        return self.arena.keep(num_bytes)

    def written(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """View `count` elements of a dtype at byte `start` of this rank's arena."""
        assert self.arena is not None
        return self.arena.tensor(start, count, dtype)

    def message(self, peer: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """View `count` elements of a dtype at byte `start` of the arena of rank `peer`: a message,
        valid until `read` gives it back, or memory that the peer keeps.
        """
        return self._peers[peer].arena.tensor(start, count, dtype)

    def put_bytes(self, start: int, data: bytes) -> None:
        """Write a few bytes into this rank's arena."""
        assert self.arena is not None
        self.arena.put(start, data)

    def get_bytes(self, peer: int, start: int, count: int) -> bytes:
        """Return `count` bytes at `start` of the arena of rank `peer`."""
        return self._peers[peer].arena.get(start, count)

    def notify(self, peer: int, what: int, stream: int, start: int = 0) -> None:
        """Send `what` (WRITTEN or POSTED) to rank `peer`, with the start of the message;
        notifications of one stream and kind arrive in the order sent.
        """
        self._peers[peer].notify(what, stream, start)

    def read(self, peer: int, start: int) -> None:
        """Give a message back: the other rank may write there again."""
        self._peers[peer].notify(_READ, 0, start)

    def expect(self, peer: int, what: int, stream: int, handler: Notification) -> None:
        """Let `handler` take the next notification of kind `what` of a stream from rank `peer`, now
        or when it comes.
        """
        self._peers[peer].expect(what, stream, handler)

    def read_own(self, start: int) -> None:
        """Count one reader of a piece of this rank's arena; after the last the piece is free."""
        self._readers[start] -= 1
        if not self._readers[start]:
            assert self.arena is not None
            del self._readers[start]
            self.arena.give(start)

    def rest(self, ranks: Container[int]) -> None:
        """Drain the sockets until every peer on this host among `ranks` has called this too.

        Shutdown is a barrier: a peer with a full send buffer would block if this rank stopped
        reading sooner.  Peers that have ended do not count.
        """
        peers = [peer for rank, peer in self._peers.items() if rank in ranks]
        waiting = {peer.rank for peer in peers}
        for peer in peers:
            peer.notify(_REST, 0, 0)
            peer.expect(_REST, 0, lambda _, k=peer.rank: waiting.discard(k))  # type: ignore[misc]
        while waiting or any(peer.unsent for peer in peers):
            self.inbox.turn()

    def close(self) -> None:
        """Leave; the others find this rank gone, if they still expect something."""
        for peer in self._peers.values():
            peer.close()
        if self.arena is not None:
            self.arena.close()


class _PeerSocket:
    """The other end of one socket."""

    def __init__(
        self,
        rank: int,
        link: socket.socket,
        arena: Arena,
        inbox: Inbox[tuple[int, int]],
        read: Callable[[int], None],
    ) -> None:
        self.rank = rank
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

    def notify(self, what: int, stream: int, start: int) -> None:
        """Send a notification.  See HostPeers.notify."""
        if not self._gone:
            self.unsent += _NOTIFICATION.pack(what, stream, start)
            self._flush()

    def expect(self, what: int, stream: int, handler: Notification) -> None:
        """Wait for a notification.  See HostPeers.expect."""
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
        if what == _READ:
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
        if not self._gone:
            self._lose()
        self._link.close()


def _accept(listener: socket.socket) -> socket.socket:
    """Accept a process of the same user: a socket without a file is open to all of the machine."""
    while True:
        one, _ = listener.accept()
        raw = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] == os.geteuid():
            return one
        one.close()


def _machine() -> tuple[str, ...]:
    """Return what is equal for processes that can reach each other's sockets by name."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return boot.read().strip(), os.readlink("/proc/self/ns/net")
