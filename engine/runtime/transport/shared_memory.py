"""The transport between ranks of one host: messages lie in shared memory (host_peers.py).

It serves ranks that compute on the CPUs of one Linux host and have not asked for
`launch.transport=gloo`; everything else goes by torch.distributed (collectives.py).  A rank writes
once what others need of its tensors, and each of them adds or joins it straight from there: no
other copy, no thread, no socket that bytes go through.  An all-reduce of 2 MB takes 0.4 ms so, and
4.0 by gloo.  All of it is done by the loop's own thread, where it picks the message up.  Sums run
in order of the members, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flowrun.engine.boxing.boxing import ALL_GATHER, ALL_REDUCE, EXCHANGE, REDUCE_SCATTER
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.transport.host_peers import AVAILABLE, POSTED, WRITTEN, HostPeers
from flowrun.engine.runtime.transport.inbox import Inbox
from flowrun.engine.runtime.transport.pending import (
    Callback,
    Collective,
    PeerGone,
    Pending,
    Ranks,
    Settled,
    num_bytes,
    put_tensors,
    tensors_in,
)
from flowrun.engine.runtime.transport.transport import (
    join_pieces,
    lies_by_columns,
    put,
    reduce_messages,
    sent_elements,
    unpack,
)

_SMALL = 1 << 16  # bytes of tensors that are summed as one; they live as long as the last of them
Starts = Mapping[int, int]  # peer -> where its message starts, in its arena


class PendingMessage:
    """A message, or several, that other ranks announce by notifications."""

    def __init__(
        self,
        peers: HostPeers,
        wanted: tuple[int, int],
        ranks: Sequence[int],
        finish: Callable[[Starts], list[Tensor]],
        sent_bytes: int,
    ) -> None:
        """wanted: (kind, stream) of the notification expected of each of `ranks`.

        finish: reads what they wrote.  sent_bytes: what this rank sends for it.
        """
        self.sent_bytes = sent_bytes
        self._inbox = peers.inbox
        self._finish: Callable[[Starts], list[Tensor]] | None = finish
        self._missing = len(ranks)
        self._starts: dict[int, int] = {}
        self._gone: int | None = None
        self._callback: Callback | None = None
        self._result: list[Tensor] = []
        for rank in ranks:
            peers.expect(rank, *wanted, lambda start, rank=rank: self._take(rank, start))  # type: ignore[misc]

    @property
    def _done(self) -> bool:
        return not self._missing or self._gone is not None

    def _take(self, peer: int, start: int | None) -> None:
        if start is None:
            self._gone = peer if self._gone is None else self._gone
        else:
            self._starts[peer] = start
            self._missing -= 1
        if self._done and self._callback:
            callback, self._callback = self._callback, None
            callback()

    def wait(self) -> list[Tensor]:
        """The tensors after the step (of a send: none), again at every call.

        Raises PeerGone if a rank that takes part has ended.
        """
        while not self._done:
            self._inbox.turn()
        if self._missing:
            raise PeerGone(f"rank {self._gone} has ended")
        if self._finish is not None:
            self._result = self._finish(self._starts)
            self._finish = None  # what it holds may go
        return self._result

    def on_done(self, callback: Callback) -> None:
        """Call back, once, when `wait` will not block: at once, or in the loop's thread."""
        if self._done:
            callback()
        else:
            self._callback = callback


class SharedMemoryTransport:
    """A Transport between this rank and those of its host.  `share`, `meet` and `rest` are its own:
    weights that a group holds once, and the end of a run.
    """

    def __init__(self, rank: int, inbox: Inbox[tuple[int, int]], host: str, used: bool) -> None:
        """rank: this one.  inbox: of its loop.  host: as of Links.  used: False reaches nobody."""
        self._rank = rank
        self._peers = HostPeers(inbox)
        self._streams: dict[Ranks, int] = {}  # of groups, < 0: those of messages are tags, >= 0
        if used and AVAILABLE and dist.is_initialized():
            self._peers.meet(rank, host)

    def reaches(self, ranks: Ranks) -> bool:
        """Return whether the ranks are on one host, whichever: all ranks answer alike."""
        return self._peers.are_together(ranks)

    def join(self, ranks: Ranks) -> None:
        """Make a group."""
        self._streams[ranks] = -1 - len(self._streams)

    def has_group(self, ranks: Ranks) -> bool:
        """Return whether `join` has made the group."""
        return ranks in self._streams

    def start(self, collective: Collective, bucket: Sequence[Tensor]) -> Pending:
        """Begin a step.  See Transport.start.  The bucket must not change before it is done, unless
        its owner lets go of it; the result is new memory.
        """
        step, layouts, index = collective.step, collective.layouts, collective.index
        if layouts.empty:
            return Settled([bucket[0].new_empty(shape) for shape in collective.after])
        member = _Member(self._peers, self._streams[collective.ranks], collective)
        for_all = step.kind in (ALL_REDUCE, EXCHANGE, ALL_GATHER)  # all want the same message
        finish = member.one_for_all(bucket) if for_all else member.one_for_each(bucket)
        sent_bytes = sent_elements(step, layouts, index) * bucket[0].dtype.itemsize
        wanted = WRITTEN, member.stream
        return PendingMessage(self._peers, wanted, list(member.others), finish, sent_bytes)

    def meet(self, ranks: Ranks) -> Pending:
        """Begin a meeting of a group that moves nothing: it is done when all have come to it."""
        others = [other for other in ranks if other != self._rank]
        _notify_all(self._peers, others, self._streams[ranks], 0)
        wanted = WRITTEN, self._streams[ranks]
        return PendingMessage(self._peers, wanted, others, lambda _: [], 0)

    def share(self, ranks: Ranks, owner: int, num_bytes: int) -> ArenaPiece:
        """Return `num_bytes` that all of `ranks` map; they all ask for it in one order, between
        steps.

        owner: the rank in whose arena it lies.  Raises PeerGone if that has ended.
        """
        stream, peers = self._streams[ranks], self._peers
        if self._rank == owner:
            begin = peers.keep(num_bytes)
            _notify_all(peers, [other for other in ranks if other != owner], stream, begin)
            return ArenaPiece(peers, None, begin)
        received: list[Starts] = []

        def finish(starts: Starts) -> list[Tensor]:
            received.append(starts)
            return []

        PendingMessage(peers, (WRITTEN, stream), [owner], finish, 0).wait()
        return ArenaPiece(peers, owner, received[0][owner])

    def send(self, tensors: Sequence[Tensor], target_rank: int, tag: int) -> Pending:
        """Begin a message.  See Transport.send.  It is done when the other rank has posted its
        slot; the tensors may change at once.
        """
        size = num_bytes([t.shape for t in tensors], [t.dtype for t in tensors])
        if not size:
            return Settled([])
        begin = self._peers.write(size)
        put_tensors(self._peers.written(begin, size, torch.uint8), tensors)
        self._peers.notify(target_rank, WRITTEN, tag, begin)
        return PendingMessage(self._peers, (POSTED, tag), [target_rank], lambda _: [], size)

    def receive(
        self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], source_rank: int, tag: int
    ) -> Pending:
        """Post a slot.  See Transport.receive."""
        size = num_bytes(shapes, dtypes)
        if not size:
            return Settled(tensors_in(torch.empty(0, dtype=torch.uint8), shapes, dtypes))

        def finish(starts: Starts) -> list[Tensor]:
            start = starts[source_rank]
            message = self._peers.message(source_rank, start, size, torch.uint8).clone()
            self._peers.read(source_rank, start)
            return tensors_in(message, shapes, dtypes)

        self._peers.notify(source_rank, POSTED, tag)
        return PendingMessage(self._peers, (WRITTEN, tag), [source_rank], finish, 0)

    def rest(self, ranks: Container[int]) -> None:
        """Wait for the ranks of this host.  See HostPeers.rest."""
        self._peers.rest(ranks)

    @property
    def message_bytes(self) -> int:
        """Most bytes of this rank's messages at once."""
        return self._peers.arena.touched if self._peers.arena else 0

    def close(self) -> None:
        """Close the sockets."""
        self._peers.close()


class _Member:
    """This rank in its group, for one step of a bucket.  others: rank -> its index."""

    def __init__(self, peers: HostPeers, stream: int, collective: Collective) -> None:
        self.peers = peers
        self.stream = stream
        self.step, self.layouts = collective.step, collective.layouts
        self.index = collective.index
        self.others = {rank: k for k, rank in enumerate(collective.ranks) if k != self.index}

    def one_for_all(self, bucket: Sequence[Tensor]) -> Callable[[Starts], list[Tensor]]:
        """Write a message that this rank reads as the others do: the bucket may go."""
        dtype, layouts, peers, step = bucket[0].dtype, self.layouts, self.peers, self.step
        sizes = [layouts.size(k, self.index) for k in range(layouts.parts)]
        size = sizes[self.index]
        begin = peers.write(size * dtype.itemsize, len(sizes))
        put(bucket, peers.written(begin, size, dtype))
        _notify_all(peers, self.others, self.stream, begin)

        def finish(starts: Starts) -> list[Tensor]:
            messages = [peers.written(begin, size, dtype)] * len(sizes)
            for rank, k in self.others.items():
                messages[k] = peers.message(rank, starts[rank], sizes[k], dtype)
            if step.kind == ALL_GATHER:
                out = join_pieces(self._unpack_all(messages), layouts)
            elif size * dtype.itemsize <= _SMALL:
                out = unpack(reduce_messages(messages, step.reduce), layouts.after(self.index))
            else:
                columns = self._unpack_all(messages)
                out = [reduce_messages(parts, step.reduce) for parts in zip(*columns, strict=True)]
            peers.read_own(begin)
            self._notify_read(starts)
            return out

        return finish

    def one_for_each(self, bucket: Sequence[Tensor]) -> Callable[[Starts], list[Tensor]]:
        """Write a message for each of the others.  Pieces that lie by columns and are to be summed
        are sent so, for who sums them turns the sum alone; after the tensors, a byte for each says
        which.
        """
        dtype, layouts, peers = bucket[0].dtype, self.layouts, self.peers
        own, summed = layouts.pieces_for(bucket, self.index), self.step.kind == REDUCE_SCATTER
        for rank, k in self.others.items():
            pieces = layouts.pieces_for(bucket, k)
            turned = [summed and lies_by_columns(piece) for piece in pieces]
            size = layouts.size(self.index, k)
            begin = peers.write(size * dtype.itemsize + len(pieces))
            lying = [p.t() if turn else p for p, turn in zip(pieces, turned, strict=True)]
            put(lying, peers.written(begin, size, dtype))
            peers.put_bytes(begin + size * dtype.itemsize, bytes(turned))
            _notify_all(peers, [rank], self.stream, begin)

        def finish(starts: Starts) -> list[Tensor]:
            columns = [own] * (len(self.others) + 1)
            for rank, k in self.others.items():
                start, size = starts[rank], layouts.size(k, self.index)
                message = peers.message(rank, start, size, dtype)
                turned = peers.get_bytes(rank, start + size * dtype.itemsize, len(own))
                columns[k] = unpack(message, layouts.message(k, self.index), turned)
            out = (
                [reduce_messages(parts, self.step.reduce) for parts in zip(*columns, strict=True)]
                if summed
                else join_pieces(columns, layouts)
            )
            self._notify_read(starts)
            return out

        return finish

    def _unpack_all(self, messages: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the pieces that each member has sent, in order of the members."""
        shapes = (self.layouts.message(k, self.index) for k in range(self.layouts.parts))
        return list(map(unpack, messages, shapes))

    def _notify_read(self, starts: Starts) -> None:
        for rank in self.others:
            self.peers.read(rank, starts[rank])


def _notify_all(peers: HostPeers, ranks: Iterable[int], stream: int, begin: int) -> None:
    for rank in ranks:
        peers.notify(rank, WRITTEN, stream, begin)


@dataclass(frozen=True, slots=True)
class ArenaPiece:
    """A piece of a rank's arena that ranks of a group write and read as their own, to the end."""

    peers: HostPeers
    peer: int | None  # whose arena; None: this rank's
    begin: int

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a flat view of `count` elements of a dtype from byte `start`."""
        if self.peer is None:
            return self.peers.written(self.begin + start, count, dtype)
        return self.peers.message(self.peer, self.begin + start, count, dtype)
