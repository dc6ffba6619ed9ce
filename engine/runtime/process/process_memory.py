"""Memory of this process, as Linux counts it."""

from __future__ import annotations

import resource
import sys


def taken() -> int:
    """Bytes of this process's own pages now; 0 where nothing counts them."""
    return _status("RssAnon")


def address_space() -> int:
    """Bytes of address space, which ulimit -v limits; 0 where nothing counts them."""
    return _status("VmSize")


def most_taken() -> int:
    """The most so far.

    Linux counts the most of all pages together.  Those of libraries are left out: they come in as
    code is first run.  So are those that several processes share: each would count them.
    """
    most = _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(taken(), most - _status("RssFile") - _status("RssShmem"))


def _status(key: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next((int(row.split()[1]) * 1024 for row in file if row.startswith(f"{key}:")), 0)
