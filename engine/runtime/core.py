"""Core: which core of its host a rank computes on, where ranks are more than cores."""

from __future__ import annotations

import os


def keep_to_a_core(rank: int, threads: int) -> None:
    """Of ranks that are more than cores each keeps to one, in turn: left to themselves three may
    wait for one core while a fourth has the other.  rank: of this host.  threads: of all its ranks.

    Where there are cores enough, and on systems that do not know of it, nothing changes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
