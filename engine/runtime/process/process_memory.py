"""Memory of a process, as Linux counts it."""

from __future__ import annotations

import resource
import sys


def taken(process: int | str = "self") -> int:
    """Bytes of a process's own pages now; 0 where nothing counts them, or it has gone."""
    return _status("RssAnon", process)


def address_space() -> int:
    """Bytes of address space, which ulimit -v limits; 0 where nothing counts them."""
    return _status("VmSize")


def most_taken() -> int:
    """The most so far, as Linux counts it: without pages of libraries, which come in as code is
    first run, and without those that several processes share, which each would count.
    """
    most = _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(taken(), most - _status("RssFile") - _status("RssShmem"))


def _status(key: str, process: int | str = "self") -> int:
    if sys.platform != "linux":
        return 0
    try:
        with open(f"/proc/{process}/status") as file:
            rows = (row.split() for row in file if row.startswith(f"{key}:"))
            return next((int(row[1]) * 1024 for row in rows), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0
