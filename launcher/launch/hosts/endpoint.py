"""launch.rdzv_endpoint: where the launchers of several hosts meet.

Its launcher listens on the endpoint's own address and on no other interface; the ranks' store and
gloo do so, too.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Any

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

    def resolve(self) -> list[str]:
        """Return the numeric addresses of its name.  Raises OSError.

        A thread asks, so that Ctrl-C need not wait for the answer.
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                addresses = dict.fromkeys(str(address[0]) for *_, address in found)
                answer.put(sorted(addresses, key=lambda address: ":" in address))  # IPv4 first
            except OSError as error:
                answer.put(error)

        threading.Thread(target=ask, daemon=True).start()
        with contextlib.suppress(queue.Empty):
            found = answer.get(timeout=_RESOLVE_S)
            if isinstance(found, list):
                return found
            raise found
        raise TimeoutError(f"no answer in {_RESOLVE_S:.0f} s")


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on one address.  port: 0 for any that is free.  Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


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
