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

from flowrun.engine.runtime.process.vital_signs import catches, list_children

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
        """Ask processes, by the index with which they have registered, for their stacks."""
        starts = {k: os.fstat(self._files[k]).st_size for k in processes}
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, _SIGNAL)
        before, deadline = [-1], time.monotonic() + _WAIT_S
        sizes = [0]
        while time.monotonic() < deadline and (not all(sizes) or sizes != before):
            time.sleep(_LOOK_S)
            before = sizes
            sizes = [os.fstat(self._files[k]).st_size - start for k, start in starts.items()]
        return {
            k: os.pread(self._files[k], size, start).decode(errors="replace")
            for (k, start), size in zip(starts.items(), sizes, strict=True)
        }

    def collect_children(self, index: int, process: int) -> dict[int, str]:
        """Return the stacks of the children that a process has forked, by their number.

        A child writes where its parent does, so they are asked one after the other; one that runs
        another program is not asked.
        """
        asked = [child for child in list_children(process) if catches(child, _SIGNAL)]
        return {child: self.collect({index: child})[index] for child in asked}

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def _open_memory() -> int:
    """Open a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
