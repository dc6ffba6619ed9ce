"""Threads that give way to those that compute."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import cast

NICE = 15  # a thirtieth of a core on which a rank computes, and all of one where it waits


def give_way(thread: threading.Thread, nice: int = NICE) -> None:
    """Set how far a thread, and those that it starts from now on, give way to others.

    nice: 0, as others, to 19.  Lower than before needs a right (CAP_SYS_NICE): without it the
    thread waits for a core that other programs have.
    """
    if sys.platform == "linux" and thread.is_alive():  # there a thread has a priority of its own
        with suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, cast("int", thread.native_id), nice)
