"""Stamps: which step lies whole in which buffer of which rank; in memory that processes share.

A rank has two buffers, and copies a variable when its last update of a step is done; a buffer whose
variables are all there gets the number of steps done as its stamp.

**Some step is whole on every rank**, at any moment after the first that was.  A rank never opens
the buffer that holds the newest such step, and under the lock only one rank opens at a time.  Where
no rank updates a step before all have updated the step before, as in every plan whose ranks need
each other's results, the newest such step is at most the steps between two snapshots back.
"""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Sequence

NONE = -1  # the stamp of a buffer that holds no whole step


class Stamps:
    """The steps done of what lies in the two buffers of each rank; shared by processes.

    ranks: of one host.  updating: those that have variables which change; the buffers of the others
    stay as they are first filled, and their stamps count for every step.
    """

    def __init__(self, ranks: Sequence[int], updating: Sequence[int]) -> None:
        self._values = memoryview(mmap.mmap(-1, 8 * (2 * len(ranks) + 1))).cast("q")
        self._index = {rank: k for k, rank in enumerate(ranks)}
        self.ranks, self.updating = tuple(ranks), tuple(updating)
        self.keep(NONE)

    def of(self, rank: int) -> tuple[int, int]:
        """The stamps of a rank's buffers."""
        k = 2 * self._index[rank]
        return self._values[k], self._values[k + 1]

    def newest(self) -> int:
        """Return the newest step that every rank holds whole; NONE if there is none."""
        if any(max(self.of(rank)) == NONE for rank in self.ranks):
            return NONE
        held = (set(self.of(rank)) for rank in self.updating)
        return max(set.intersection(*held) - {NONE}, default=NONE)

    def open(self, rank: int) -> int:
        """Return the buffer where a rank may write a step, which holds no whole step from now on:
        never the one that holds the newest of all.
        """
        with self._lock:
            kept, stamps = self.newest(), self.of(rank)
            buffer = 1 - stamps.index(kept) if kept in stamps else 0
            self._values[2 * self._index[rank] + buffer] = NONE
        return buffer

    def close(self, rank: int, buffer: int, step: int) -> None:
        """Stamp the buffer of a rank: it holds `step` whole."""
        self._values[2 * self._index[rank] + buffer] = step

    def keep(self, step: int) -> None:
        """Forget all but one step, or all (NONE), between the death of ranks and the next fork."""
        for rank in self.ranks:
            if step == NONE or rank in self.updating:
                for buffer, stamp in enumerate(self.of(rank)):
                    self.close(rank, buffer, stamp if stamp == step else NONE)
        # a rank that was killed may have held the lock
        self._lock = multiprocessing.get_context("fork").Lock()
