"""Links: what joins one rank to the others, and which transport carries what.

Ranks of one host share memory (shared_memory.py): no byte goes through a socket, which on a CPU
would take its time from compute.  Between hosts, and on CUDA, torch.distributed does it
(collectives.py: gloo, NCCL).  A group that spans hosts goes by torch.distributed as a whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from flowrun.engine.actors.communicators import rows_of
from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.transport.arena import ArenaPiece
from flowrun.engine.runtime.transport.collectives import TorchTransport
from flowrun.engine.runtime.transport.inbox import Inbox
from flowrun.engine.runtime.transport.pending import Collective, Pending, Ranks, Transport
from flowrun.engine.runtime.transport.shared_memory import SharedMemoryTransport


class Links:
    """The connections of one rank, made once and shared by its plans.

    inbox: of the rank's loop: it sleeps there on whatever comes.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        host: str = "",
        shared: bool = True,
        own_groups: bool | None = None,
    ) -> None:
        """Connect a rank; with several ranks, init_process_group has been called.

        host: ranks share memory if they are on one machine and name the same.  shared: False to
        leave all to torch.distributed.  own_groups: messages go by groups of their own, one for
        each direction between two stages; None: on CUDA, as NCCL knows no tags.
        """
        self.rank = rank
        self.device = device
        self.inbox: Inbox[tuple[int, int]] = Inbox()
        used = shared and device.type == "cpu"
        self._shared = SharedMemoryTransport(rank, self.inbox, host, used)
        self._own_groups = device.type == "cuda" if own_groups is None else own_groups
        self._torch = TorchTransport(rank, device)
        self._carriers: dict[Ranks, Transport] = {}

    def join(self, plan: Plan) -> None:
        """Make the groups that the collectives of a plan run over; all ranks join all plans, in one
        order.
        """
        if self._own_groups:
            self._torch.join_plan(plan)
        else:
            self.join_groups(ranks for rows in rows_of(plan).values() for ranks in rows)

    def join_groups(self, wanted: Iterable[Ranks]) -> None:
        for ranks in sorted(set(wanted)):
            carrier = self._carrier(ranks)
            if not carrier.has_group(ranks):
                carrier.join(ranks)

    def _carrier(self, ranks: Ranks) -> Transport:
        if ranks not in self._carriers:
            self._carriers[ranks] = self._shared if self._shared.reaches(ranks) else self._torch
        return self._carriers[ranks]

    def start(self, collective: Collective, bucket: Sequence[Tensor]) -> Pending:
        return self._carrier(collective.ranks).start(collective, bucket)

    def share(self, ranks: Ranks, owner: int, num_bytes: int) -> ArenaPiece | None:
        """Return `num_bytes` of memory in the arena of rank `owner` that all `ranks` map; None if
        they share none.
        """
        shares = self._shared.has_group(ranks)
        return self._shared.share(ranks, owner, num_bytes) if shares else None

    def meet(self, ranks: Ranks) -> Pending:
        """Begin a meeting of a group that has such memory."""
        return self._shared.meet(ranks)

    def send(self, tensors: Sequence[Tensor], target_rank: int, tag: int) -> Pending:
        return self._carrier((self.rank, target_rank)).send(tensors, target_rank, tag)

    def receive(
        self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], source_rank: int, tag: int
    ) -> Pending:
        return self._carrier((self.rank, source_rank)).receive(shapes, dtypes, source_rank, tag)

    def rest(self, ranks: Container[int]) -> None:
        """Return when the ranks on this host no longer need each other's loops.  All of `ranks`
        call it before they wait for something that no inbox sees (a barrier, a disk).
        """
        self._shared.rest(ranks)

    @property
    def message_bytes(self) -> int:
        """Most bytes of this rank's messages in shared memory at once."""
        return self._shared.message_bytes

    def close(self) -> None:
        """Leave; every message must be done."""
        self._torch.close()
        self._shared.close()
        self.inbox.close()
