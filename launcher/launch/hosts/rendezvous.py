"""The place where the ranks of a run meet, for the agent of torch.distributed.elastic.

The agents of several hosts do not look for each other: their launchers have met before (hosts.py).
Elastic's own rendezvous unpickles a record of hosts from a store that listens on all interfaces and
that anyone can write to.  Here nothing is pickled, and the ranks' store listens on one interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from flowrun.launcher.launch.hosts.endpoint import Endpoint, listen


def open_store(address: str) -> Any:
    """Open a store for the ranks of a run that listens on one address only, on a free port."""
    listener = listen(address)
    port = listener.getsockname()[1]
    made: Any = dist.TCPStore  # type: ignore[attr-defined]
    return made(address, port, is_master=True, master_listen_fd=listener.detach())


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """The ranks of a round meet in a store.

    number, num_hosts: of this host.  address, port: of the ranks' store.  interface: of the network
    between them; empty if it has no name that could be found.  name: of the round.  links: where
    each host takes copies of its neighbour's state; None for one that takes none.
    """

    number: int
    num_hosts: int
    address: str
    port: int
    interface: str
    name: str = ""
    links: tuple[Endpoint | None, ...] = ()


class Rendezvous(RendezvousHandler):
    """The answers to elastic's agent: one round, and all hosts are here."""

    def __init__(self, place: MeetingPlace) -> None:
        self.place = place
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]  # the agent's own

    @property
    def use_agent_store(self) -> bool:
        """Return whether ranks connect to a store that is open already."""
        return True

    def get_backend(self) -> str:
        """Return a name for elastic's log."""
        return "flowrun"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return where the ranks meet."""
        place = self.place
        where = RendezvousStoreInfo(place.address, place.port)
        return RendezvousInfo(self.store, place.number, place.num_hosts, where)

    def is_closed(self) -> bool:
        """It never is: there is one round."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other host to notice."""

    def num_nodes_waiting(self) -> int:
        """No other host asks to join."""
        return 0

    def get_run_id(self) -> str:
        """Return a name for elastic's log."""
        return "flowrun"

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True
