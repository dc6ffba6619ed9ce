"""Links: what joins one rank to the others, and which transport carries what.

Ranks of one host share memory (shared_memory.py): no byte goes through a socket, which on a CPU
would take its time from compute.  Between hosts, and on CUDA, torch.distributed does it
(collectives.py: gloo, NCCL).  A group that spans hosts goes by torch.distributed as a whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrun.engine.actors.plan import SEND, BoxWork, Plan, TransferWork
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.transport import collectives, host_peers, shared_memory
from flowrun.engine.runtime.transport.host_peers import HostPeers
from flowrun.engine.runtime.transport.inbox import Inbox
from flowrun.engine.runtime.transport.pending import Pending
from flowrun.engine.runtime.transport.transport import BucketLayout

Ranks = tuple[int, ...]


def channels_of(plan: Plan) -> set[tuple[int, Ranks]]:
    """(channel, (source, target)) of all messages between grids."""
    found: set[tuple[int, Ranks]] = set()
    for actor in plan.actors:
        if isinstance(actor.work, TransferWork) and actor.kind == SEND:
            for sends in plan.routes(actor.work):
                found.update((actor.work.channel, (one.source, one.target)) for one in sends)
    return found


class Links:
    """Made by every rank, once; for all plans that it runs.

    inbox: of the rank's loop: it sleeps there on whatever comes.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        host: str = "",
        shared: bool = True,
        group_per_channel: bool | None = None,
    ) -> None:
        """Where there are several ranks, init_process_group has been called.

        host: ranks share memory if they are on one machine and name the same.  shared: False to
        leave all to torch.distributed.  group_per_channel: torch has a group for each
        channel between two ranks; None: on CUDA, as NCCL knows no tags, and what one group sends
        waits for what it is to receive.
        """
        self.rank = rank
        self.device = device
        self.inbox: Inbox[tuple[int, int]] = Inbox()
        self._peers = HostPeers(self.inbox)
        self._groups: dict[Ranks, Any] = {}  # that torch carries
        self._group_per_channel = (
            device.type == "cuda" if group_per_channel is None else group_per_channel
        )
        self._channels: dict[tuple[int, Ranks], Any] = {}  # (tag, source and target)
        self._streams: dict[Ranks, int] = {}  # of the others: those of messages are tags, >= 0
        if shared and host_peers.AVAILABLE and device.type == "cpu" and dist.is_initialized():
            self._peers.meet(rank, host)

    def join(self, plan: Plan) -> None:
        """Make the groups that the collectives of a plan run over; all ranks join all plans, in
        one order.
        """
        wanted = {
            ranks
            for actor in plan.actors
            if isinstance(actor.work, BoxWork)
            for ranks in plan.placements[actor.stage].groups(actor.work.step.axis)
        }
        self.join_groups(wanted)
        if self._group_per_channel:
            for channel in sorted(channels_of(plan) - self._channels.keys()):
                self._channels[channel] = self._connected(channel[1])

    def join_groups(self, wanted: Iterable[Ranks]) -> None:
        """The same, by their ranks."""
        for ranks in sorted(set(wanted) - self._groups.keys() - self._streams.keys()):
            if self._peers.are_together(ranks):
                self._streams[ranks] = -1 - len(self._streams)
            else:
                self._groups[ranks] = self._connected(ranks)

    def _connected(self, ranks: Ranks) -> Any:
        """A group of torch's; all ranks make all, in one order."""
        group = dist.new_group(sorted(ranks))
        if self._group_per_channel and self.rank in ranks:
            collectives.connect(group, self.device)
        return group

    def start(
        self,
        step: BoxingStep,
        bucket: Sequence[Tensor],
        layouts: BucketLayout,
        ranks: Ranks,
        index: int,
    ) -> Pending:
        """Begin a collective; see collectives.start."""
        if (stream := self._streams.get(ranks)) is not None:
            return shared_memory.start(step, bucket, layouts, self._peers, stream, ranks, index)
        return collectives.start(step, bucket, layouts, self._groups[ranks], ranks, index)

    def share(self, ranks: Ranks, owner: int, num_bytes: int) -> shared_memory.ArenaPiece | None:
        """Memory of a group, see shared_memory.share; None if it has none that all of it maps."""
        stream = self._streams.get(ranks)
        if stream is None:
            return None
        return shared_memory.share(self._peers, stream, ranks, self.rank, owner, num_bytes)

    def meet(self, ranks: Ranks) -> Pending:
        """Begin a meeting of a group that has such memory; see shared_memory.meet."""
        return shared_memory.meet(self._peers, self._streams[ranks], ranks, self.rank)

    def send(self, tensors: Sequence[Tensor], target_rank: int, tag: int) -> Pending:
        """Begin one message; see collectives.send."""
        if target_rank in self._peers:
            return shared_memory.send(self._peers, tensors, target_rank, tag)
        group = self._channels.get((tag, (self.rank, target_rank)))
        return collectives.send(tensors, target_rank, tag, group)

    def receive(
        self,
        shapes: Sequence[Shape],
        dtypes: Sequence[torch.dtype],
        source_rank: int,
        tag: int,
    ) -> Pending:
        """Post the slot for one message; see collectives.receive."""
        if source_rank in self._peers:
            return shared_memory.receive(self._peers, shapes, dtypes, source_rank, tag)
        group = self._channels.get((tag, (source_rank, self.rank)))
        return collectives.receive(shapes, dtypes, source_rank, tag, group, self.device)

    def rest(self, ranks: Container[int]) -> None:
        """Return when those of these ranks that are on this host need each other's loops no more:
        before they wait for what no inbox hears of (a barrier, a disk).  They all call this.
        """
        self._peers.rest(ranks)

    @property
    def message_bytes(self) -> int:
        """Most bytes of this rank's messages in shared memory at once."""
        return self._peers.arena.touched if self._peers.arena else 0

    def close(self) -> None:
        """Every message must be done."""
        collectives.close_channels()
        self._peers.close()
        self.inbox.close()
