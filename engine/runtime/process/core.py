"""The cores on which a rank computes: one, where its host has none left over; on CUDA, those near
its device.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")


def pin_to_core(rank: int, ranks: int, threads: int = 1) -> None:
    """Pin this process to one core if its host has no more cores than ranks of one thread.

    rank: number of this rank among those of its host.  Without pins the scheduler may leave three
    ranks on one core and one on another; of as many ranks as cores, one that wakes another draws it
    to its own: steps of 2.4 ms take 3.2.  Nothing changes without affinity (macOS).
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores) or (ranks == len(cores) and threads == 1):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def pin_near(device: str, devices: Path = _DEVICES) -> None:
    """Keep this process on those of its cores that are near a device: on its NUMA node.

    device: its PCI address, "0000:4b:00.0".  Nothing changes where the system does not say which
    cores these are, or the process has none of them.
    """
    with suppress(OSError):
        text = (devices / device / "local_cpulist").read_text(encoding="ascii").strip()
        spans = [span.split("-") for span in text.split(",") if span]
        near = {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
        if kept := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, kept)
