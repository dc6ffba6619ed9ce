"""The rendezvous of a run on one host: its ranks are those of one agent, which waits for nobody.

Elastic's own rendezvous keeps a record of hosts that come and go, in a store that they share, and
looks up the source line of its callers for each entry: 0.4 s before the first step and 0.9 s after
the last one, of a GPT of 4 blocks on 2 cores.
"""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

LOOPBACK = "127.0.0.1"
ONE_HOST = "flowrun-one-host"  # LaunchConfig.rdzv_backend


class OneHost(RendezvousHandler):
    """The agent's store is the ranks' own, on a free port of loopback: nobody else reaches it."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        made: Any = dist.TCPStore  # type: ignore[attr-defined]
        with socket.create_server((LOOPBACK, 0)) as listener:  # torch's own listens everywhere
            port = listener.getsockname()[1]
            self.store = made(LOOPBACK, port, is_master=True, master_listen_fd=listener.detach())

    @property
    def use_agent_store(self) -> bool:
        """Return whether the ranks connect to the agent's store."""
        return True

    def get_backend(self) -> str:
        """The name that LaunchConfig chooses it by."""
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        """This host is the first of one."""
        where = RendezvousStoreInfo(LOOPBACK, self.store.port)
        return RendezvousInfo(self.store, 0, 1, where)

    def is_closed(self) -> bool:
        """It never is: there is one round."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other host to notice."""

    def num_nodes_waiting(self) -> int:
        """No other host asks to join."""
        return 0

    def get_run_id(self) -> str:
        """Return the run id of LaunchConfig."""
        return self.run_id

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True


def register() -> None:
    """Make ONE_HOST known to elastic."""
    rendezvous_handler_registry.register(ONE_HOST, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneHost(parameters.run_id)
