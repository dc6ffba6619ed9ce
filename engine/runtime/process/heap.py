"""The heap of a process: pages that a worker's step frees are kept for the next; those that the
launcher frees while it looks at a model are not.

A page that the kernel hands out again costs 1 to 2 microseconds, of a CPU step a tenth.  This is
done by glibc's malloc, which torch's tensors on the CPU come from; elsewhere nothing is done.

A tensor starts at a multiple of 64 bytes, so malloc takes some more and gives back what is left
over.  It goes to a cache of small pieces, where nothing joins its neighbours: when the tensor is
freed, the hole is too small for the next of the same size, and the heap grows.  Without these
caches a rank takes 10 to 30 % less memory, in the same time.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# mallopt(3)
_M_MXFAST = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -3, -4, -1
_MOST = (
    32 << 20
)  # where malloc stops when it moves its own threshold up, to twice that for trimming
_TUNABLES, _NO_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"


def start_over() -> None:
    """Run this program anew in this process, its malloc without the caches of its threads; returns
    where that is so already, or cannot be had.

    Malloc is told so by the environment, when a program begins, and by nothing else.  What the
    user has set there stays.
    """
    told = os.environ.get(_TUNABLES, "")
    if _glibc() is None or "tcache_count" in told:
        return
    os.environ[_TUNABLES] = f"{told}:{_NO_CACHE}" if told else _NO_CACHE
    os.execv(sys.executable, sys.orig_argv)


def keep_pages() -> bool:
    """All memory comes from one heap that never shrinks, and pieces join their neighbours when they
    are freed; False where that cannot be had.

    A threshold would not do: malloc maps and unmaps what is larger, such as the logits of a step.
    """
    libc = _glibc()
    if libc is None:
        return False
    told = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_MXFAST, 0))
    return all(libc.mallopt(*what) for what in told)


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
