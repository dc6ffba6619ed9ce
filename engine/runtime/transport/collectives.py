"""The transport of torch.distributed: every collective and message of it is here.

Nothing here blocks but `Pending.wait`.  "Done" means that the bytes are there:
on CUDA a thread of the group sleeps on an event after the communication.  If
the stream that computes waited for it instead, nothing would be computed at that time, and a
receive that is posted early would hold up the very act whose answer it is.  It waits where nothing
goes before what reads a collective (drivers/distributed.py).

Measured with gloo of torch 2.13: its reduce-scatter is an all-reduce inside and sends twice the
bytes, while its all-to-all takes unequal pieces and any dtype.  So uneven steps, and reduce-scatter
on the CPU, go by all-to-all and are summed by the receiver, in order of the members.  So do those
all-reduces of which the plan says that they are exchanged (Level.exchange_bytes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from flowrun.engine.actors.communicators import disjoint_calls, groups_of, ways_of
from flowrun.engine.actors.plan import BoxWork, Plan
from flowrun.engine.boxing.boxing import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    JOINED_KINDS,
    REDUCE_SCATTER,
)
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.process.call_stack import in_one_chunk
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
    BucketLayout,
    bucket_layout,
    join_pieces,
    pack,
    reduce_messages,
    sent_elements,
    unpack,
)

Group = dist.ProcessGroup | None  # None: of all ranks
# Process group, the other rank, tag, True for sends; on CUDA (group, -1, 0, True) of all in it.
Channel = tuple[Group, int, int, bool]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renames these two and warns at the old names.
Begin = Callable[..., dist.Work]
_all_gather: Begin = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Begin = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def _others() -> Iterator[None]:
    """Around what torch does with other ranks.  Raises PeerGone for what it says of them; what a
    device says of this rank stays.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise PeerGone(f"{type(error).__name__}: {error}") from error


class TorchPending(Pending):
    """Communication under way by torch."""

    def __init__(
        self,
        work: dist.Work | None,
        finish: Callable[[], list[Tensor]],
        holds: Sequence[Tensor],
        channel: Channel | None,
        sent_bytes: int = 0,
    ) -> None:
        """holds: memory to keep until it is done: a stream that frees it may write there while
        another still reads.

        channel: of what a thread must wait for: gloo gives a message no future, and NCCL's is there
        before the bytes are.
        """
        super().__init__(finish, sent_bytes)
        self._work = work
        self._holds = holds
        on_cuda = channel and holds[0].is_cuda  # one thread waits for all of a group
        self._channel = (channel[0], -1, 0, True) if channel and on_cuda else channel
        self._watched: threading.Event | None = None
        self._error: RuntimeError | None = None

    def _block(self) -> None:
        """Block; on CUDA, where on_done was not called, the current stream alone waits."""
        if self._watched is None:
            self.settle()
        else:
            self._watched.wait()  # only one thread may wait for a message of gloo, and once
        if self._error is not None:
            raise self._error

    def on_done(self, callback: Callback) -> None:
        """Call back, once, when `wait` will not block any more: at once, or from another thread."""
        if self._work is None or self._finish is None:
            callback()
        elif self._channel is None:
            self._work.get_future().add_done_callback(lambda _: callback())
        else:
            self._watched = threading.Event()
            _watcher(self._channel).inbox.put((self, self._watched, callback))

    def settle(
        self, make_stream: Callable[[torch.device], torch.cuda.Stream] | None = None
    ) -> None:
        """Wait for torch's handle; an error is kept for `wait`.

        make_stream: of CUDA, which waits in the place of the current one, and the host for it.
        """
        device = self._holds[0].device
        try:
            stream = make_stream(device) if make_stream and device.type == "cuda" else None
            if self._work is not None:
                with _others(), nullcontext() if stream is None else torch.cuda.stream(stream):
                    self._work.wait()
                if stream is not None:
                    reached = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    reached.record(stream)
                    reached.synchronize()
        except RuntimeError as error:  # all that torch says of ranks and devices
            self._error = error


# ---- the transport -------------------------------------------------------------------------------


class TorchTransport:
    """A Transport between any ranks: a process group of torch's for each group."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._groups: dict[Ranks, Group] = {}
        self._ways: dict[Ranks, Group] = {}  # source and target, in groups of their own
        self._made: set[tuple[str, Ranks]] = set()  # of the run: communicator, ranks
        self._carried: set[tuple[str, Ranks]] = set()  # a call of torch's that was made, ranks

    def reaches(self, ranks: Ranks) -> bool:
        return True

    def join(self, ranks: Ranks) -> None:
        self._groups[ranks] = dist.new_group(sorted(ranks))

    def has_group(self, ranks: Ranks) -> bool:
        return ranks in self._groups

    def join_plan(self, plan: Plan) -> None:
        """Make the groups of a plan's communicators, and connect them for what they carry."""
        groups, ways = groups_of(plan), ways_of(plan)
        assert plan.one_order or not groups, "else groups would be used in any order"
        named = ((name, ranks) for name, each in groups.items() for ranks in each)
        new = [each for each in named if each not in self._made]
        self._made.update(new)
        for call in disjoint_calls(new):
            group = self._new_groups([ranks for _, ranks in call])
            for name, ranks in call:
                if self._rank in ranks:
                    self._groups[ranks] = group
                    if name in ways:
                        connect(group, self._device, ways[name])
                        mine = (way for way in ways[name] if self._rank in way)
                        self._ways.update(dict.fromkeys(mine, group))
        self._act_dry(plan)

    def _act_dry(self, plan: Plan) -> None:
        """Act once by each call of torch's that a group of this rank carries."""
        for actor in plan.actors:
            work, placement = actor.work, plan.placements[actor.stage]
            if not isinstance(work, BoxWork) or self._rank not in placement.ranks:
                continue
            axis, here = work.step.axis, placement.coordinate(self._rank)
            layouts, dtype = bucket_layout(work, placement.shape, here), work.moves[0].dtype
            ranks = placement.group(self._rank, axis)
            collective = Collective(work.step, layouts, ranks, here[axis])
            carried = call_of(collective, dtype, self._device.type == "cuda"), ranks
            if carried not in self._carried and not layouts.empty:
                self._carried.add(carried)
                shapes = (each.before(here[axis]) for each in layouts.each)
                zeros = [torch.zeros(x, dtype=dtype, device=self._device) for x in shapes]
                self.start(collective, zeros).wait()
                _settle(self._device)

    def _new_groups(self, groups: Sequence[Ranks]) -> Group:
        """Make groups that have no rank in common, by NCCL in one call; return this rank's."""
        if self._device.type == "cuda":
            return dist.split_group(split_ranks=[sorted(ranks) for ranks in groups])
        made = {ranks: dist.new_group(sorted(ranks)) for ranks in groups}
        return next((group for ranks, group in made.items() if self._rank in ranks), None)

    def start(self, collective: Collective, bucket: Sequence[Tensor]) -> Pending:
        """Begin a step.  The bucket is only read; results are new memory."""
        step, layouts, ranks = collective.step, collective.layouts, collective.ranks
        assert step.moves and layouts.parts == len(ranks), f"{step}, {len(ranks)} ranks"
        if layouts.empty:
            return Pending(lambda: [bucket[0].new_empty(shape) for shape in collective.after])
        group = self._groups[ranks]
        sent_bytes = sent_elements(step, layouts, collective.index) * bucket[0].element_size()
        on_cuda, dtype = bucket[0].is_cuda, bucket[0].dtype
        begin = _BEGIN[call_of(collective, dtype, on_cuda)]
        work, finish, holds = begin(collective, bucket, group)
        channel = (group, -1, 0, True) if on_cuda else None
        return TorchPending(work, finish, holds, channel, sent_bytes)

    def send(self, tensors: Sequence[Tensor], target_rank: int, tag: int) -> Pending:
        """Begin a message, done when the other rank has received it; the tensors must not change
        before.

        tag: one for each channel of the plan, not for each message: a thread waits for each.
        """
        size = num_bytes([t.shape for t in tensors], [t.dtype for t in tensors])
        if not size:
            return Pending(list)
        group = self._ways.get((self._rank, target_rank))
        message = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        put_tensors(message, tensors)
        with _others():
            work = dist.isend(message, dst=target_rank, group=group, tag=tag)
        return TorchPending(work, list, (message,), (group, target_rank, tag, True), size)

    def receive(
        self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], source_rank: int, tag: int
    ) -> Pending:
        group = self._ways.get((source_rank, self._rank))
        size = num_bytes(shapes, dtypes)
        message = torch.empty(size, dtype=torch.uint8, device=self._device)

        def finish() -> list[Tensor]:
            return tensors_in(message, shapes, dtypes)

        if not size:
            return Pending(finish)
        with _others():
            work = dist.irecv(message, src=source_rank, group=group, tag=tag)
        return TorchPending(work, finish, (message,), (group, source_rank, tag, False))

    def close(self) -> None:
        """End the threads of the channels."""
        close_channels()


def connect(group: Group, device: torch.device, ways: Collection[Ranks]) -> None:
    """Have each member of a group, which this rank is one of, send a byte each way (source and
    target), and wait.

    NCCL connects two ranks when the first of them sends to the other or receives, and holds its
    host until the other does so too (ncclP2PPreconnectFunc of its group.cc): two that post their
    receives before they send would never come to that.  What all ranks do in one order cannot.
    """
    here, members = dist.get_rank(), dist.get_process_group_ranks(group)
    there, back = (
        [int((here, k) in ways) for k in members],
        [int((k, here) in ways) for k in members],
    )
    outbox, inbox = (torch.zeros(sum(n), dtype=torch.uint8, device=device) for n in (there, back))
    with _others():
        dist.all_to_all_single(inbox, outbox, back, there, group=group)
    _settle(device)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ---- collectives ---------------------------------------------------------------------------------


def call_of(collective: Collective, dtype: torch.dtype, on_cuda: bool) -> str:
    """Return the collective of torch's that carries a step: an all-to-all for uneven pieces, and
    for statistics, a number a row, whose sum no library knows.
    """
    kind, layouts, index = collective.step.kind, collective.layouts, collective.index
    known = kind == ALL_GATHER or collective.step.reduce in _OPS
    if kind == REDUCE_SCATTER:
        known &= on_cuda and dtype != torch.bool
    ends = ((k, index) if kind == ALL_GATHER else (index, k) for k in range(layouts.parts))
    even = kind == ALL_REDUCE or len({layouts.size(*each) for each in ends}) == 1
    return kind if known and even and kind in _BEGIN else ALL_TO_ALL


# Torch's handle, what unpacks when it is done, and what must stay until then.
Begun = tuple[dist.Work, Callable[[], list[Tensor]], Sequence[Tensor]]


def _begin_all_reduce(collective: Collective, bucket: Sequence[Tensor], group: Group) -> Begun:
    step, shapes = collective.step, collective.after
    message = pack(bucket)
    reduce = "max" if message.dtype == torch.bool and step.reduce == "sum" else step.reduce
    with _others():
        work = dist.all_reduce(message, op=_OPS[reduce], group=group, async_op=True)
    return work, lambda: unpack(message, shapes), (message,)


def _begin_all_gather(collective: Collective, bucket: Sequence[Tensor], group: Group) -> Begun:
    layouts, index = collective.layouts, collective.index
    sizes = [layouts.size(k, index) for k in range(layouts.parts)]
    message = pack(bucket)
    whole = message.new_empty(sum(sizes))
    with _others():
        work = _all_gather(whole, message, group=group, async_op=True)
    return work, lambda: _join(whole.split(sizes), layouts, index), (whole, message)


def _begin_reduce_scatter(collective: Collective, bucket: Sequence[Tensor], group: Group) -> Begun:
    step, layouts, index = collective.step, collective.layouts, collective.index
    pieces = [pack(layouts.pieces_for(bucket, index, k)) for k in range(layouts.parts)]
    messages = torch.cat(pieces)
    shard = messages.new_empty(layouts.size(index, index))
    with _others():
        work = _reduce_scatter(shard, messages, op=_OPS[step.reduce], group=group, async_op=True)
    return work, lambda: unpack(shard, collective.after), (shard, messages)


def _begin_all_to_all(collective: Collective, bucket: Sequence[Tensor], group: Group) -> Begun:
    """Each message straight to who wants it, of any size; what a rank sends itself stays here."""
    step, layouts, index = collective.step, collective.layouts, collective.index
    members = range(layouts.parts)
    there = [layouts.size(index, k) if k != index else 0 for k in members]
    back = [layouts.size(k, index) if k != index else 0 for k in members]
    pieces = {k: layouts.pieces_for(bucket, index, k) for k in members}
    outbox = torch.cat([pack(pieces[k]) for k in members if k != index])
    alike = step.kind in (ALL_REDUCE, EXCHANGE)  # all get the same
    own = outbox[: layouts.size(index, index)] if alike else pack(pieces[index])
    inbox = outbox.new_empty(sum(back))
    with _others():
        work = dist.all_to_all_single(inbox, outbox, back, there, group=group, async_op=True)

    def finish() -> list[Tensor]:
        messages = list(inbox.split(back))
        messages[index] = own
        if step.kind in JOINED_KINDS:
            return _join(messages, layouts, index)
        return unpack(reduce_messages(messages, step.reduce), collective.after)

    return work, finish, (inbox, outbox)


def _join(messages: Sequence[Tensor], layouts: BucketLayout, index: int) -> list[Tensor]:
    """Return the tensors of this member after an all-gather or all-to-all.

    messages: one from each member, its own too.
    """
    columns = [unpack(m, layouts.message(k, index)) for k, m in enumerate(messages)]
    return join_pieces(columns, layouts, index)


_BEGIN = {
    ALL_REDUCE: _begin_all_reduce,
    ALL_GATHER: _begin_all_gather,
    REDUCE_SCATTER: _begin_reduce_scatter,
    ALL_TO_ALL: _begin_all_to_all,
}


# ---- threads that wait ---------------------------------------------------------------------------


class _Watcher:
    """The thread of one channel, or of a group on CUDA: it waits in order and calls back."""

    def __init__(self, channel: Channel) -> None:
        _, other, tag, sends = channel
        way = "to" if sends else "from"
        self.inbox: SimpleQueue[tuple[TorchPending, threading.Event, Callback] | None] = (
            SimpleQueue()
        )
        self.stream: torch.cuda.Stream | None = None
        self.thread = threading.Thread(
            target=in_one_chunk(self._run),
            name=f"message {way} rank {other} tag {tag}",
            daemon=True,
        )
        self.thread.start()

    def _run(self) -> None:
        while (entry := self.inbox.get()) is not None:
            pending, watched, callback = entry
            pending.settle(self._stream_of)
            watched.set()
            callback()
            del entry, pending, watched, callback  # and what they hold, while this sleeps

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        """This thread's own, on CUDA."""
        if self.stream is None:
            torch.cuda.set_device(device)  # of this thread; else it opens the first
            # torch has 32 streams to hand out, again and again: these are other ones than
            # those that compute, communicate or record
            self.stream = torch.cuda.Stream(device, priority=-1)
        return self.stream


_watchers: dict[Channel, _Watcher] = {}


def _watcher(channel: Channel) -> _Watcher:
    if channel not in _watchers:
        _watchers[channel] = _Watcher(channel)
    return _watchers[channel]


def close_channels() -> None:
    """End the threads that wait for messages; every message must be done."""
    for watcher in _watchers.values():
        watcher.inbox.put(None)
    for watcher in _watchers.values():
        watcher.thread.join()
    _watchers.clear()
