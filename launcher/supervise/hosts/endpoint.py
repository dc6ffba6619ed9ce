"""launch.rdzv_endpoint: where the launchers of several hosts meet, at one of them or of a list.

Its launcher listens on the endpoint's own address and on no other interface; the ranks' store and
gloo do so, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_RESOLVE_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """An endpoint is HOST:PORT."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Endpoint:
        """Parse HOST:PORT, or [IPv6 address]:PORT.  Raises ValueError."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not host or not 0 < int(port) < 1 << 16:
            raise ValueError(text)
        return Endpoint(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def resolve(self) -> list[str]:
        """Return the numeric addresses of its name, IPv4 first.  Raises OSError.

        A thread asks that nobody joins: an answer may take a minute.
        """
        answer: Future[list[str]] = Future()
        answer.set_running_or_notify_cancel()

        def ask() -> None:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                addresses = dict.fromkeys(str(address[0]) for *_, address in found)
                answer.set_result(sorted(addresses, key=lambda address: ":" in address))
            except OSError as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="resolve", daemon=True).start()
        return await asyncio.wait_for(asyncio.wrap_future(answer), _RESOLVE_S)


@dataclass(frozen=True)
class MeetingPlace:
    """The ranks of a round meet in a store.

    number, num_hosts: of this host.  address, port: of the ranks' store.  interface: of the network
    between them; empty if it has no name that could be found.
    """

    number: int
    num_hosts: int
    address: str
    port: int
    interface: str


def open_store(address: str) -> Any:
    """Open a store for the ranks of a run that listens on one address only, on a free port."""
    listener = listen(address)
    port = listener.getsockname()[1]
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(address, port, is_master=True, master_listen_fd=listener.detach())


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on one address.  port: 0 for any that is free.  Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)


def find_interface(address: str) -> str:
    """Return the name of the network interface with this address; empty if it cannot be found."""
    if sys.platform != "linux":
        return ""
    import fcntl

    address = LOOPBACK if address.startswith("127.") else address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                raw = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(raw[20:24]) == address:
                    return name
    return ""
