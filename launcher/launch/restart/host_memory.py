"""Memory that this host can still give."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def available_bytes() -> int:
    """Return the memory that this host, or the control group of this process, can still give; all
    there can be where nothing counts it.
    """
    found = [sys.maxsize]
    if sys.platform == "linux":
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(rows["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            most = int((group / "memory.max").read_text())
            found.append(most - int((group / "memory.current").read_text()))
    return min(found)
