"""Several processes of one host, of which one launches: the others leave with its status.

They meet at a socket that the one that launches opens before it starts a run.  The kernel closes it
when that process ends, however it does: those that wait never outlive it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

from flowrun.engine.errors import RunError
from flowrun.launcher.platforms.platform import Platform

FAILED = 1  # where it was killed, and said nothing
_COME_S, _RETRY_S, _DISMISS_S = 120.0, 0.05, 10.0
_OF_THE_RUN = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # which it answers
_CREDENTIALS = struct.Struct("3i")  # of a process: its own number, its user's, its group's

_waited_for: list[tuple[socket.socket, int]] = []


def launch_for(platform: Platform, others: int) -> None:
    """Let other processes of this host wait for the end of this one.  Raises RunError."""
    listener, place = socket.socket(socket.AF_UNIX), _place(platform)
    with suppress(OSError, ValueError):  # a file of a process that was killed
        os.unlink(place)
    try:
        listener.bind(place)
    except OSError as error:
        listener.close()
        job = f"{platform.name} job {platform.job}".removesuffix(" job ")
        problem = f"another process of this host already launches for {job}."
        raise RunError(f"process {platform.process}", problem) from error
    listener.listen(others)
    _waited_for.append((listener, others))


def dismiss(status: object, within_s: float = _DISMISS_S) -> None:
    """Let those that wait leave with a status.  within_s: for those that have not come yet."""
    while _waited_for:
        listener, others = _waited_for.pop()
        until = time.monotonic() + within_s
        with listener, suppress(OSError):
            while others:
                listener.settimeout(max(0.0, until - time.monotonic()))
                other, _ = listener.accept()
                if not _is_own(other):
                    other.close()
                    continue
                others -= 1
                with other, suppress(OSError):  # it was killed
                    other.send(bytes([status if isinstance(status, int) else bool(status)]))


def wait_for_end(platform: Platform) -> int:
    """Wait for the end of the process that launches; return its status.  Signals are for it.
    Raises RunError if it does not come.
    """
    until = time.monotonic() + _COME_S
    with suppress(OSError):
        while time.monotonic() < until:
            with socket.socket(socket.AF_UNIX) as end:
                if not end.connect_ex(_place(platform)) and _is_own(end):
                    for number in _OF_THE_RUN:
                        signal.signal(number, signal.SIG_IGN)
                    return (end.recv(1) or bytes([FAILED]))[0]
            time.sleep(_RETRY_S)
        came = f"the process of this host that launches did not come in {_COME_S:.0f} s"
        raise RunError(f"process {platform.process}", f"{came}: see its output.")
    return FAILED


def _is_own(end: socket.socket) -> bool:
    """Return whether the other end is the same user's: a socket without a file is open to all."""
    if sys.platform != "linux":  # where files have owners
        return True
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _place(platform: Platform) -> str:
    """Return the address of the socket: on Linux a name alone, which leaves no file behind."""
    job = f"{platform.name} {platform.job or os.getppid()} {platform.host}"
    digest = hashlib.sha256(job.encode()).hexdigest()[:32]  # an address has 107 bytes
    return f"{'/tmp/' if sys.platform == 'darwin' else chr(0)}flowrun-{os.getuid()}-{digest}"
