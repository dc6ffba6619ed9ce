"""Several processes of one host, of which one launches: the others leave with its status.

They meet at a socket that the one that launches opens before anything else.  The kernel closes it
when that process ends, however it does: those that wait never outlive it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time
from contextlib import suppress

from flowrun.launcher.platforms.platform import Platform

FAILED = 1  # where it was killed, and said nothing
_COME_S, _RETRY_S, _DISMISS_S = 120.0, 0.05, 10.0
_OF_THE_RUN = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # which it answers

_waited_for: list[tuple[socket.socket, int]] = []


def launch_for(platform: Platform, others: int) -> None:
    """Let other processes of this host wait for the end of this one.  Raises OSError."""
    listener, place = socket.socket(socket.AF_UNIX), _place(platform)
    with suppress(OSError, ValueError):  # a file of a process that was killed
        os.unlink(place)
    listener.bind(place)
    listener.listen(others)
    _waited_for.append((listener, others))


def dismiss(status: object, within_s: float = _DISMISS_S) -> None:
    """Let those that wait leave with a status.  within_s: for those that have not come yet."""
    while _waited_for:
        listener, others = _waited_for.pop()
        until = time.monotonic() + within_s
        with listener, suppress(OSError):
            for _ in range(others):
                listener.settimeout(max(0.0, until - time.monotonic()))
                other, _ = listener.accept()
                with other, suppress(OSError):  # it was killed
                    other.send(bytes([status if isinstance(status, int) else bool(status)]))


def wait_for_end(platform: Platform) -> int:
    """Wait for the end of the process that launches; return its status.  Signals are for it."""
    until = time.monotonic() + _COME_S
    with suppress(OSError):
        while time.monotonic() < until:
            with socket.socket(socket.AF_UNIX) as end:
                if not end.connect_ex(_place(platform)):
                    for number in _OF_THE_RUN:
                        signal.signal(number, signal.SIG_IGN)
                    return (end.recv(1) or bytes([FAILED]))[0]
            time.sleep(_RETRY_S)
    return FAILED


def _place(platform: Platform) -> str:
    """Return the address of the socket: on Linux a name alone, which leaves no file behind."""
    job = f"{platform.name} {platform.job or os.getppid()} {platform.host}"
    digest = hashlib.sha256(job.encode()).hexdigest()[:32]  # an address has 107 bytes
    return f"{'/tmp/' if sys.platform == 'darwin' else chr(0)}flowrun-{os.getuid()}-{digest}"
