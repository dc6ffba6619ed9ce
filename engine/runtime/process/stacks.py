"""Stacks of processes that hang: each writes its Python stacks at a signal, into memory that its
parent reads.  A process that is stopped, or sleeps in the kernel, writes nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Mapping

_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_WAIT_S, _LOOK_S = 1.0, 0.05


class Stacks:
    """Room for the stacks of `count` processes, made before they are forked."""

    def __init__(self, count: int) -> None:
        self._files = [_open_memory() for _ in range(count)]

    def register(self, index: int) -> None:
        """Let this process write its stacks, as number `index`, whenever it is asked to."""
        faulthandler.register(_SIGNAL, file=self._files[index], all_threads=True)

    def collect(self, processes: Mapping[int, int]) -> dict[int, str]:
        """Ask processes for their stacks and return them.

        processes: index -> process that has registered.
        """
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, _SIGNAL)
        before, deadline = [-1], time.monotonic() + _WAIT_S
        sizes = [0]
        while time.monotonic() < deadline and (not all(sizes) or sizes != before):
            time.sleep(_LOOK_S)
            before, sizes = sizes, [os.fstat(self._files[k]).st_size for k in processes]
        return {
            k: os.pread(self._files[k], size, 0).decode(errors="replace")
            for k, size in zip(processes, sizes, strict=True)
        }

    def close(self) -> None:
        """Let go of the memory."""
        for file in self._files:
            os.close(file)


def _open_memory() -> int:
    """Open a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
