"""Two hosts on one machine: a network namespace each, and a link between them that can be cut."""

import itertools
import os
import subprocess
from functools import cache

from support.runs.warm_start import NAMESPACES

_DEVICE, _PORT = "eth0", 29500
_numbers = itertools.count()


class LinkedHosts:
    """A pair of hosts that a link joins.

    namespaces, addresses: of both.  endpoint: an address of host 0, with a port that is free.
    """

    def __init__(self) -> None:
        name = f"flowrun-{os.getpid()}-{next(_numbers)}"
        self.namespaces = (f"{name}-0", f"{name}-1")
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self.endpoint = f"{self.addresses[0]}:{_PORT}"
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        for namespace in self.namespaces:
            _ip("netns", "add", namespace)
        first, second = self.namespaces
        _ip(*f"link add {_DEVICE} netns {first} type veth peer {_DEVICE} netns {second}".split())
        for namespace, address in zip(self.namespaces, self.addresses, strict=True):
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", _DEVICE)
            for device in ("lo", _DEVICE):
                _ip("-n", namespace, "link", "set", device, "up")

    def cut(self, host: int) -> None:
        """Pull the plug of a host: nothing goes through the link from now on."""
        _ip("-n", self.namespaces[host], "link", "set", _DEVICE, "down")

    def mend(self) -> None:
        for namespace in self.namespaces:
            _ip("-n", namespace, "link", "set", _DEVICE, "up")

    def close(self) -> None:
        """Remove both namespaces, and the link with them."""
        for namespace in self.namespaces:
            if os.path.exists(f"{NAMESPACES}/{namespace}"):
                _ip("netns", "delete", namespace)


@cache
def find_obstacle() -> str:
    """Say why there can be no linked hosts here; empty if there can."""
    try:
        LinkedHosts().close()
    except FileNotFoundError:
        return "there is no command `ip`"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
