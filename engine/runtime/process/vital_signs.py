"""Vital signs of another process, as the kernel shows them (Linux; elsewhere nothing is known)."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_LOOKS, _LOOK_S = 3, 0.05  # a process that waits for a disk at each look has waited all the time


def describe_halt(process: int) -> str:
    """Say why a process cannot run, such as "is stopped by a signal"; empty if it can."""
    states = {_read_state(process)}
    if states <= {"T", "t"}:
        return "is stopped by a signal"
    for _ in range(_LOOKS - 1):
        if states != {"D"}:
            return ""
        time.sleep(_LOOK_S)
        states.add(_read_state(process))
    return f"sleeps in the kernel ({_read(process, 'wchan') or '?'}), as on a disk that hangs"


def measure_work(process: int) -> tuple[float, int]:
    """Return the CPU seconds that a process has used, and the bytes that it has read or written."""
    counts = _read(process, "stat").rpartition(")")[2].split()
    cpu = sum(map(int, counts[11:13])) / _TICKS if counts else 0.0
    lines = (line.split() for line in _read(process, "io").splitlines())
    return cpu, sum(int(n) for name, n in lines if name in ("rchar:", "wchar:"))


def _read_state(process: int) -> str:
    """Return the letter of a process' state; "?" if it has gone."""
    return (_read(process, "stat").rpartition(")")[2].split() or "?")[0]


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_text()
    except OSError:
        return ""
