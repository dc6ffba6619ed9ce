"""Arena: memory of one rank that the other ranks of its host read: messages, and weights that they
write too (share_weights.py).

An anonymous file in memory: it has no name that could be left behind, and goes when the last
process that maps it ends.  It is as large as the rank's share of the machine's memory and takes
what has been touched: pages come into being when first written.  Messages lie as low as they fit,
so what is touched is the most that was ever under way at once, and a small loop of messages stays
in the caches.
"""

from __future__ import annotations

import mmap
import os
import resource
from typing import NamedTuple

import torch
from torch import Tensor

from flowrun.engine.cost.first_fit import FirstFit, round_to_pages
from flowrun.engine.runtime.process.process_memory import address_space


def _share(ranks: int) -> int:
    """Bytes of one arena: a rank's share of the machine's memory, or less where ulimit -v or -f
    allows less; half of the address space that is left stays free.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    all_of_them = os.sysconf("SC_PHYS_PAGES") * page
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        all_of_them = min(all_of_them, max(0, space - address_space()) // 2)
    file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    share = all_of_them // ranks
    return (share if file == resource.RLIM_INFINITY else min(share, file)) // page * page


class Arena:
    """Memory as bytes and as tensors: of a descriptor, or of this process alone."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self.memory = memory

    @staticmethod
    def of(descriptor: int) -> Arena:
        """Map the memory of another process."""
        return Arena(mmap.mmap(descriptor, os.fstat(descriptor).st_size))

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a flat view of `count` elements of a dtype from byte `start`."""
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start)


class ArenaPiece(NamedTuple):
    """A piece of an arena that ranks of a group write and read as their own, to the end."""

    arena: Arena
    begin: int

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a flat view of `count` elements of a dtype from byte `start`; its storage is no
        larger.
        """
        return self.arena.tensor(self.begin + start, count, dtype)


class OwnArena(Arena):
    """The arena that this rank writes: who wants to write takes a piece first."""

    def __init__(self, ranks: int = 1) -> None:
        """ranks: of this host; each maps the arenas of all."""
        self.descriptor = os.memfd_create("flowrun", os.MFD_CLOEXEC)
        size = _share(ranks)
        os.ftruncate(self.descriptor, size)
        super().__init__(mmap.mmap(self.descriptor, size))
        self._pieces = FirstFit(size)
        self._kept = 0

    @property
    def touched(self) -> int:
        """Bytes that messages ever used."""
        return self._pieces.touched - self._kept

    def take(self, num_bytes: int) -> int:
        """The start of a piece that nobody uses: the lowest that fits."""
        return self._pieces.take(num_bytes)

    def keep(self, num_bytes: int) -> int:
        """The same, for good."""
        self._kept += round_to_pages(num_bytes)
        return self._pieces.take(num_bytes)

    def give(self, start: int) -> None:
        """The piece is free again."""
        self._pieces.give(start)

    def close(self) -> None:
        """Let go of the descriptor; the memory stays as long as it is mapped."""
        os.close(self.descriptor)
