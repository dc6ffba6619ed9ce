"""Core: which core of its host a rank computes on, where ranks are more than cores."""

from __future__ import annotations

import os


def keep_to_a_core(rank: int, ranks: int) -> None:
    """Of ranks that are more than cores each keeps to one, in turn: left to themselves three may
    wait for one core while a fourth has the other.  rank: of this host.  ranks: all that it has,
    whatever their threads: these would otherwise share one core while others have nothing to do.

    Where there are cores enough, and on systems that do not know of it, nothing changes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
