"""The transport between ranks of one host: messages lie in shared memory (host_peers.py).

It serves ranks that compute on the CPUs of one Linux host and have not asked for
`launch.transport=gloo`; everything else goes by torch.distributed (collectives.py).  A rank writes
once what others need of its tensors, and each of them adds or joins it straight from there: no
other copy, no thread, no socket that bytes go through.  An all-reduce of 2 MB takes 0.4 ms so, and
4.0 by gloo.  All of it is done by the loop's own thread, where it picks the message up.  Sums run
in order of the members, so all get the same bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flowrun.engine.boxing.boxing import ALL_GATHER, ALL_REDUCE, EXCHANGE, JOINED_KINDS
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.transport import host_peers
from flowrun.engine.runtime.transport.arena import Arena, ArenaPiece, OwnArena
from flowrun.engine.runtime.transport.host_peers import POSTED, READ, REST, WRITTEN, HostPeer
from flowrun.engine.runtime.transport.inbox import Inbox
from flowrun.engine.runtime.transport.pending import (
    Callback,
    Collective,
    PeerGone,
    Pending,
    Ranks,
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

_SMALL = 1 << 16  # bytes
Starts = Mapping[int, int]  # peer -> where its message starts, in its arena


class PendingMessage(Pending):
    """A message, or several, that other ranks announce by notifications."""

    def __init__(
        self,
        inbox: Inbox[tuple[int, int]],
        wanted: tuple[int, int],
        peers: Mapping[int, HostPeer],
        finish: Callable[[Starts], list[Tensor]] = lambda _: [],
        sent_bytes: int = 0,
    ) -> None:
        """wanted: (kind, stream) of the notification expected of each of `peers`.

        finish: reads what they wrote.
        """
        super().__init__(lambda: finish(self.starts), sent_bytes)
        self.starts: dict[int, int] = {}
        self._inbox = inbox
        self._missing = len(peers)
        self._gone: int | None = None
        self._callback: Callback | None = None
        for rank, peer in peers.items():
            peer.expect(*wanted, lambda start, rank=rank: self._take(rank, start))  # type: ignore[misc]

    @property
    def _done(self) -> bool:
        return not self._missing or self._gone is not None

    def _take(self, peer: int, start: int | None) -> None:
        if start is None:
            self._gone = peer if self._gone is None else self._gone
        else:
            self.starts[peer] = start
            self._missing -= 1
        if self._done and self._callback:
            callback, self._callback = self._callback, None
            callback()

    def _block(self) -> None:
        """Raises PeerGone if a rank that takes part has ended."""
        while not self._done:
            self._inbox.turn()
        if self._missing:
            raise PeerGone(f"rank {self._gone} has ended")

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
        """host: as of Links.  used: False reaches nobody."""
        self._rank = rank
        self._inbox = inbox
        self._hosts: list[set[int]] = []  # the ranks of each
        self._peers: dict[int, HostPeer] = {}
        self._arena: OwnArena | None = None
        self._readers: dict[int, int] = {}  # start -> ranks that have yet to read what lies there
        self._streams: dict[Ranks, int] = {}  # of groups, < 0: those of messages are tags, >= 0
        if used and host_peers.AVAILABLE and dist.is_initialized():
            self._connect(host)

    def _connect(self, host: str) -> None:
        """Connect to the ranks that name the same host; every rank of every host does so."""
        with host_peers.listen() as listener:
            met: list[tuple[tuple[str, ...], bytes]] = [((), b"")] * dist.get_world_size()
            here = host, *host_peers.machine()
            dist.all_gather_object(met, (here, listener.getsockname()))
            names: dict[tuple[str, ...], dict[int, bytes]] = {}
            for rank, (where, name) in enumerate(met):
                names.setdefault(where, {})[rank] = name
            self._hosts = list(map(set, names.values()))
            if len(names[here]) == 1:
                return
            arena = self._arena = OwnArena(len(names[here]))
            try:
                met_here = host_peers.shake_hands(self._rank, names[here], listener, arena)
                for rank, link, memory in met_here:
                    self._peers[rank] = HostPeer(link, memory, self._inbox, self._free)
            except (ConnectionError, TimeoutError, struct.error) as error:
                raise PeerGone(f"a rank of this host has ended: {error}") from error

    def reaches(self, ranks: Ranks) -> bool:
        """Return whether the ranks are on one host, whichever: all ranks answer alike."""
        return any(here.issuperset(ranks) for here in self._hosts)

    def join(self, ranks: Ranks) -> None:
        self._streams[ranks] = -1 - len(self._streams)

    def has_group(self, ranks: Ranks) -> bool:
        return ranks in self._streams

    # ---- this rank's memory ----------------------------------------------------------------------

    @property
    def arena(self) -> OwnArena:
        """The memory of this rank, which reaches another."""
        assert self._arena is not None
        return self._arena

    @property
    def message_bytes(self) -> int:
        """Most bytes of this rank's messages at once."""
        return self._arena.touched if self._arena else 0

    def _take(self, num_bytes: int, readers: int) -> int:
        """Return the start of a piece of memory that `readers` ranks will read."""
        start = self.arena.take(max(1, num_bytes))  # an owner of nothing writes nothing
        self._readers[start] = readers
        return start

    def _free(self, start: int) -> None:
        """Count one reader of a piece; after the last it is free."""
        self._readers[start] -= 1
        if not self._readers[start]:
            del self._readers[start]
            self.arena.give(start)

    # ---- collectives -----------------------------------------------------------------------------

    def start(self, collective: Collective, bucket: Sequence[Tensor]) -> Pending:
        """Begin a step.  The bucket must not change before it is done, unless its owner lets go of
        it; the result is new memory.

        What all members want alike is written once, and this rank reads it as the others do: the
        bucket may go.  Else each of them gets a message of its own, in which pieces that lie by
        columns and are to be summed lie so, for who sums them turns the sum alone; after the
        tensors a byte for each says which.
        """
        step, layouts, index = collective.step, collective.layouts, collective.index
        if layouts.empty:
            return Pending(lambda: [bucket[0].new_empty(shape) for shape in collective.after])
        dtype = bucket[0].dtype
        to, of = _ends(collective)
        stream, peers = self._streams[collective.ranks], self._peers_of(of)
        summed = step.kind not in JOINED_KINDS
        for_all = step.kind in (ALL_REDUCE, EXCHANGE, ALL_GATHER)
        flags = 0 if for_all else len(bucket)
        size = layouts.size(index, index)
        # one sum of several small tensors, which then live as long as the last of them
        flat = for_all and summed and size * dtype.itemsize <= _SMALL
        if for_all:
            begin = self._write(bucket, size, b"", 1 + len(to))
            begins = dict.fromkeys(to, begin)
            own = _read(
                self.arena, begin, [(size,)] if flat else layouts.message(index, index), dtype, 0
            )
        else:
            begins = {}
            own = layouts.pieces_for(bucket, index, index)
            for rank, k in to.items():
                pieces = layouts.pieces_for(bucket, index, k)
                turned = bytes(summed and lies_by_columns(piece) for piece in pieces)
                begins[rank] = self._write(pieces, layouts.size(index, k), turned, 1)
        for rank, peer in self._peers_of(to).items():
            peer.notify(WRITTEN, stream, begins[rank])

        def finish(starts: Starts) -> list[Tensor]:
            columns = _columns(collective, own)
            for rank, k in of.items():
                shapes = [(size,)] if flat else layouts.message(k, index)
                columns[k] = _read(peers[rank].arena, starts[rank], shapes, dtype, flags)
            if summed:
                out = [reduce_messages(parts, step.reduce) for parts in zip(*columns, strict=True)]
            else:
                out = join_pieces(columns, layouts, index)
            if flat:
                out = unpack(out[0], collective.after)
            if for_all:
                self._free(begin)
            for rank, peer in peers.items():
                peer.notify(READ, start=starts[rank])
            return out

        sent_bytes = sent_elements(step, layouts, index) * dtype.itemsize
        return PendingMessage(self._inbox, (WRITTEN, stream), peers, finish, sent_bytes)

    def _peers_of(self, ranks: Iterable[int]) -> dict[int, HostPeer]:
        return {rank: self._peers[rank] for rank in ranks if rank != self._rank}

    def _write(self, pieces: Sequence[Tensor], count: int, turned: bytes, readers: int) -> int:
        """Write a message of `count` elements; return its start.  turned: which pieces go by
        columns; empty: none does.
        """
        dtype = pieces[0].dtype
        start = self._take(count * dtype.itemsize + len(turned), readers)
        lying = [
            piece.t() if turn else piece
            for piece, turn in zip(pieces, turned or bytes(len(pieces)), strict=True)
        ]
        put(lying, self.arena.tensor(start, count, dtype))
        after = start + count * dtype.itemsize
        self.arena.memory[after : after + len(turned)] = turned
        return start

    # ---- weights that a group holds once ---------------------------------------------------------

    def meet(self, ranks: Ranks) -> PendingMessage:
        """Begin a meeting of a group that moves nothing: it is done when all have come to it."""
        peers, stream = self._peers_of(ranks), self._streams[ranks]
        for peer in peers.values():
            peer.notify(WRITTEN, stream)
        return PendingMessage(self._inbox, (WRITTEN, stream), peers)

    def share(self, ranks: Ranks, owner: int, num_bytes: int) -> ArenaPiece:
        """Return `num_bytes` that all of `ranks` map; they all ask for it in one order, between
        steps.

        owner: the rank in whose arena it lies.  Raises PeerGone if that has ended.
        """
        stream = self._streams[ranks]
        if self._rank == owner:
            begin = self.arena.keep(num_bytes)
            for peer in self._peers_of(ranks).values():
                peer.notify(WRITTEN, stream, begin)
            return ArenaPiece(self.arena, begin)
        announced = PendingMessage(self._inbox, (WRITTEN, stream), self._peers_of([owner]))
        announced.wait()
        return ArenaPiece(self._peers[owner].arena, announced.starts[owner])

    # ---- messages --------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], target_rank: int, tag: int) -> Pending:
        """Begin a message, done when the other rank has posted its slot; the tensors may change at
        once.
        """
        size = num_bytes([t.shape for t in tensors], [t.dtype for t in tensors])
        if not size:
            return Pending(list)
        begin = self._take(size, 1)
        put_tensors(self.arena.tensor(begin, size, torch.uint8), tensors)
        peers = self._peers_of([target_rank])
        peers[target_rank].notify(WRITTEN, tag, begin)
        return PendingMessage(self._inbox, (POSTED, tag), peers, sent_bytes=size)

    def receive(
        self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], source_rank: int, tag: int
    ) -> Pending:
        size = num_bytes(shapes, dtypes)
        if not size:
            return Pending(lambda: tensors_in(torch.empty(0, dtype=torch.uint8), shapes, dtypes))
        peer = self._peers[source_rank]

        def finish(starts: Starts) -> list[Tensor]:
            start = starts[source_rank]
            message = peer.arena.tensor(start, size, torch.uint8).clone()
            peer.notify(READ, start=start)
            return tensors_in(message, shapes, dtypes)

        peer.notify(POSTED, tag)
        return PendingMessage(self._inbox, (WRITTEN, tag), {source_rank: peer}, finish)

    # ---- the end ---------------------------------------------------------------------------------

    def rest(self, ranks: Container[int]) -> None:
        """Drain the sockets until every peer on this host among `ranks` has called this too.

        Shutdown is a barrier: a peer with a full send buffer would block if this rank stopped
        reading sooner.  Peers that have ended do not count.
        """
        peers = {rank: peer for rank, peer in self._peers.items() if rank in ranks}
        waiting = set(peers)
        for rank, peer in peers.items():
            peer.notify(REST)
            peer.expect(REST, 0, lambda _, rank=rank: waiting.discard(rank))  # type: ignore[misc]
        while waiting or any(peer.unsent for peer in peers.values()):
            self._inbox.turn()

    def close(self) -> None:
        """Leave; the others find this rank gone, if they still expect something."""
        for peer in self._peers.values():
            peer.close()
        if self._arena is not None:
            self._arena.close()


def _ends(collective: Collective) -> tuple[dict[int, int], dict[int, int]]:
    """Return the members that this one writes to, and those that it reads from: all others, but
    around a ring one each.  Rank -> member.
    """
    layouts, index = collective.layouts, collective.index
    members = zip(collective.ranks, range(layouts.parts), strict=True)
    others = [(rank, k) for rank, k in members if k != index]
    to = {rank: k for rank, k in others if layouts.size(index, k)}
    return to, {rank: k for rank, k in others if layouts.size(k, index)}


def _columns(collective: Collective, own: list[Tensor]) -> list[list[Tensor]]:
    """Return what each member sends, as far as no message comes of it: this one its own, and others
    pieces without an element.
    """
    layouts, index = collective.layouts, collective.index
    columns = [own] * layouts.parts
    for k in range(layouts.parts):
        if k != index and not layouts.size(k, index):
            columns[k] = unpack(own[0].new_empty(0), layouts.message(k, index))
    return columns


def _read(
    arena: Arena, start: int, shapes: Sequence[Shape], dtype: torch.dtype, flags: int
) -> list[Tensor]:
    """Return the pieces of a message in an arena, as views of it.  flags: bytes after them that say
    which go by columns.
    """
    count = sum(map(math.prod, shapes))
    after = start + count * dtype.itemsize
    turned = arena.memory[after : after + flags] or bytes(len(shapes))
    return unpack(arena.tensor(start, count, dtype), shapes, turned)
