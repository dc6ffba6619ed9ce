"""The cores of this host that other programs have, as the kernel counts them."""

from __future__ import annotations

import os

PROBE = "FLOWRUN_PROBE"  # environment variable; 0: nothing of this machine is measured
CoreSeconds = tuple[float, float]


def count_seconds() -> CoreSeconds:
    """Return seconds of all cores since some moment: all, and those that neither this process nor
    its ended children had; zeros where the kernel does not count, or nothing is measured.
    """
    if os.environ.get(PROBE) == "0" or not os.path.exists("/proc/stat"):
        return 0.0, 0.0
    with open("/proc/stat") as file:
        ticks = [int(column) for column in file.readline().split()[1:9]]
    busy = sum(ticks) - sum(ticks[3:5])  # idle, and idle until a disk answers
    return sum(ticks) / 100, busy / 100 - sum(os.times()[:4])


def share_of_others(since: CoreSeconds) -> float:
    """Return the share of the cores that other programs have had since then, from 0 to 1."""
    cores_s, others_s = (now - then for now, then in zip(count_seconds(), since, strict=True))
    return min(1.0, max(0.0, others_s / cores_s)) if cores_s > 0 else 0.0
