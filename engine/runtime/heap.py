"""The heap of a worker process: pages that a step frees are kept for the next.

A page that the kernel hands out again costs 1 to 2 microseconds, of a CPU step a tenth.  This is
done by glibc's malloc, which torch's tensors on the CPU come from; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -4, -1  # mallopt(3)


def keep_pages() -> bool:
    """All memory comes from one heap that never shrinks; False where that cannot be had.

    A threshold would not do: malloc maps and unmaps what is larger, such as the logits of a step.
    """
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return None
    return libc
