"""Settings of the process heap: a worker keeps the pages that a step frees for the next step; the
launcher returns large blocks to the system while it inspects a model.

A page fault costs 1 to 2 microseconds, in sum a tenth of a CPU step.  The settings are those of
glibc's malloc, which allocates torch's CPU tensors; with another C library nothing happens.

torch aligns a tensor to 64 bytes, so malloc allocates more and frees the remainder.  The remainder
goes to a cache of small chunks (tcache, fastbins) that never merges neighbours.  When the tensor
is freed, the hole is too small for the next tensor of its size, and the heap grows.  Without these
caches a rank needs 10 to 30 % less memory, in the same time.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# parameters of mallopt(3)
_M_MXFAST = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -3, -4, -1
# malloc raises its mmap threshold to at most this many bytes, its trim threshold to twice as many
_MAX_MMAP_THRESHOLD = 32 << 20
_TUNABLES, _NO_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"


def reexec_with_tunables() -> None:
    """Replace this process by the same program with malloc's thread caches switched off, unless
    they are off already or the C library is not glibc.

    glibc reads this setting only from the environment (GLIBC_TUNABLES) when a program starts.
    Tunables that the user has set stay.
    """
    tunables = os.environ.get(_TUNABLES, "")
    if _glibc() is None or "tcache_count" in tunables:
        return
    os.environ[_TUNABLES] = f"{tunables}:{_NO_CACHE}" if tunables else _NO_CACHE
    os.execv(sys.executable, sys.orig_argv)


def keep_pages() -> bool:
    """Allocate everything from one heap that never shrinks; freed chunks merge with neighbours.

    Return False if the C library is not glibc or refuses.  A higher mmap threshold would not be
    enough: malloc maps and unmaps every larger block, such as the logits of a step.
    """
    libc = _glibc()
    if libc is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_MXFAST, 0))
    return all(libc.mallopt(*setting) for setting in settings)


@contextmanager
def trim_above(least_bytes: int) -> Iterator[None]:
    """Within the block, return allocations of `least_bytes` or more to the system when freed.

    By default a small allocation made later, at the top of the heap, keeps all below it.  After
    the block malloc has the thresholds that it would reach by itself.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, least_bytes)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return None
    return libc
