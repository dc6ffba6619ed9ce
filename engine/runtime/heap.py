"""The heap of a process: pages that a worker's step frees are kept for the next; those that the
launcher frees while it looks at a model are not.

A page that the kernel hands out again costs 1 to 2 microseconds, of a CPU step a tenth.  This is
done by glibc's malloc, which torch's tensors on the CPU come from; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -3, -4, -1
_MOST = (
    32 << 20
)  # where malloc stops when it moves its own threshold up, to twice that for trimming


def keep_pages() -> bool:
    """All memory comes from one heap that never shrinks; False where that cannot be had.

    A threshold would not do: malloc maps and unmaps what is larger, such as the logits of a step.
    """
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


@contextmanager
def returning(least_bytes: int) -> Iterator[None]:
    """Within, memory of so many bytes goes back to the system when it is freed; behind it, as where
    malloc comes to by itself.  Otherwise something small that is allocated meanwhile keeps it.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, least_bytes)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MOST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MOST)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return None
    return libc
