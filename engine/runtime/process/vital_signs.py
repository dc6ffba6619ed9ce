"""Vital signs of another process, as the kernel shows them (Linux; elsewhere nothing is known)."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_BYTES = ("rchar:", "wchar:", "read_bytes:")  # the last one has what is mapped, too
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


class ProcessWork(NamedTuple):
    """The work of a process: CPU seconds; bytes read or written, with those of the whole system
    while one of its threads waits for a disk (fsync shows no progress of its own); seconds for
    which its threads, those that live, could run and had no core.
    """

    cpu_s: float
    num_bytes: int
    starved_s: float = 0.0


def measure_work(process: int) -> ProcessWork:
    """Return what a process has done so far."""
    counts = _read(process, "stat").rpartition(")")[2].split()
    cpu_s = sum(map(int, counts[11:13])) / _TICKS if counts else 0.0
    lines = (line.split() for line in _read(process, "io").splitlines())
    num_bytes = sum(int(n) for name, n in lines if name in _BYTES)
    threads = [f"{process}/task/{thread}" for thread in _threads(process)]
    if any(_read_state(thread) == "D" for thread in threads):
        pages = re.search(r"^nr_written (\d+)$", _read("", "vmstat"), re.MULTILINE)
        num_bytes += int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0
    waits = (_read(thread, "schedstat").split()[1:2] for thread in threads)
    return ProcessWork(cpu_s, num_bytes, sum(int(ns) / 1e9 for each in waits for ns in each))


def list_children(process: int) -> list[int]:
    """Return the processes that one has forked and that have not ended."""
    listed = (_read(f"{process}/task/{thread}", "children") for thread in _threads(process))
    return sorted(int(child) for text in listed for child in text.split())


def catches(process: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    mask = re.search(r"^SigCgt:\s*(\w+)$", _read(process, "status"), re.MULTILINE)
    return bool(mask and int(mask[1], 16) >> (number - 1) & 1)


def _threads(process: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{process}/task")
    except OSError:
        return []


def _read_state(process: int | str) -> str:
    """Return the letter of a process' state; "?" if it has gone."""
    return (_read(process, "stat").rpartition(")")[2].split() or "?")[0]


def _read(process: int | str, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_text()
    except OSError:
        return ""
