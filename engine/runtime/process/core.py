"""The core on which a rank computes, where its host has more ranks than cores."""

from __future__ import annotations

import os


def pin_to_core(rank: int, ranks: int) -> None:
    """Pin this process to one core if its host has more ranks than cores.

    rank: number of this rank among those of its host.  Without pins the scheduler may leave three
    ranks on one core and one on another.  Nothing changes if the system has no affinity (macOS).
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
