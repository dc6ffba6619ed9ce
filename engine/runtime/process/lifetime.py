"""A process that lives no longer than the one that forked it, which alone ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def end_with(parent: int) -> None:
    """Let only the parent end this process, and end it if the parent is killed itself (Linux).

    What asks a run to end, or to save, is for the launcher: Slurm sends it to all processes.
    """
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    for number in (*asking, signal.SIGCONT):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
