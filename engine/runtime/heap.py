"""The heap of a worker process: pages that a step frees are kept for the next, and those of the
foreseen peak are there before the first step, as huge pages where the system has them.

A page that the kernel hands out again costs 1 to 2 microseconds, of a CPU step a tenth.  This is
done by glibc's malloc, which torch's tensors on the CPU come from; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -4, -1  # mallopt(3)
_MADV_HUGEPAGE = 14  # madvise(2)
_HUGE_BYTES = 1 << 21


def keep_pages() -> bool:
    """All memory comes from one heap that never shrinks; False where that cannot be had.

    A threshold would not do: malloc maps and unmaps what is larger, such as the logits of a step.
    """
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def touch(num_bytes: int) -> None:
    """Extend the heap by so many bytes and have their pages; behind keep_pages."""
    libc = _glibc()
    start = libc.malloc(num_bytes) if libc is not None and num_bytes else None
    if libc is None or not start:
        return
    first = -(-start // _HUGE_BYTES) * _HUGE_BYTES
    if (length := (start + num_bytes) // _HUGE_BYTES * _HUGE_BYTES - first) > 0:
        libc.madvise(first, length, _MADV_HUGEPAGE)  # EINVAL where there are none: small ones, then
    ctypes.memset(start, 0, num_bytes)
    libc.free(start)


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
