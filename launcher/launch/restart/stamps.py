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
_HALF = 31  # bits of a step


class Stamps:
    """The steps done of what lies in the two buffers of each rank; shared by processes.

    ranks: of one host.  updating: those that have variables which change; the buffers of the others
    stay as they are first filled, and their stamps count for every step.  aimed: the host is one of
    several, which take snapshots of the same steps (aims.py): a rank opens a buffer for the target
    alone, and never the buffer that holds the step which all hosts keep.
    """

    def __init__(self, ranks: Sequence[int], updating: Sequence[int], aimed: bool = False) -> None:
        count = len(ranks)
        self._values = memoryview(mmap.mmap(-1, 8 * (4 * count + 1))).cast("q")
        self._index = {rank: k for k, rank in enumerate(ranks)}
        self._writing, self._passed, self._aim = 2 * count, 3 * count, 4 * count
        self.ranks, self.updating, self.aimed = tuple(ranks), tuple(updating), aimed
        for k in range(4 * count):
            self._values[k] = NONE
        self.aim(0, 0)
        self.keep(NONE)

    def of(self, rank: int) -> tuple[int, int]:
        """The stamps of a rank's buffers."""
        k = 2 * self._index[rank]
        return self._values[k], self._values[k + 1]

    def all_steps(self) -> set[int]:
        """Return the steps that some rank holds whole, of those that change."""
        return {stamp for rank in self.updating for stamp in self.of(rank)} - {NONE}

    def newest(self) -> int:
        """Return the newest step that every rank holds whole; NONE if there is none."""
        if any(max(self.of(rank)) == NONE for rank in self.ranks):
            return NONE
        held = (set(self.of(rank)) for rank in self.updating)
        return max(set.intersection(*held) - {NONE}, default=NONE)

    def holds(self, rank: int, step: int) -> bool:
        """Return whether a rank holds `step` whole."""
        stamps = self.of(rank)
        return step in stamps if rank in self.updating else max(stamps) != NONE

    def open(self, rank: int, step: int) -> int | None:
        """Return the buffer where a rank may write `step`, which holds no whole step from now on;
        None if the rank is to let the step pass.
        """
        k, (kept, target) = self._index[rank], self.aims
        if self.aimed and step != target:
            self.pass_by(rank, step)
            return None
        with self._lock:
            kept, stamps = kept if self.aimed else self.newest(), self.of(rank)
            buffer = 1 - stamps.index(kept) if kept in stamps else 0
            self._values[2 * k + buffer] = NONE
        self._values[self._writing + k] = step
        self._values[self._passed + k] = step  # last: see is_missed
        return buffer

    def pass_by(self, rank: int, step: int) -> None:
        """Note that a rank has come to a step of which it takes no snapshot."""
        self._values[self._passed + self._index[rank]] = step

    def close(self, rank: int, buffer: int, step: int) -> None:
        """Stamp the buffer of a rank: it holds `step` whole."""
        self._values[2 * self._index[rank] + buffer] = step

    @property
    def aims(self) -> tuple[int, int]:
        """The step that all hosts keep, and the one that they take a snapshot of next."""
        both = self._values[self._aim]
        return both >> _HALF, both & (1 << _HALF) - 1

    def aim(self, kept: int, target: int) -> None:
        """Set both, in one word: a rank sees the old ones or the new ones."""
        self._values[self._aim] = kept << _HALF | target

    @property
    def is_missed(self) -> bool:
        """True if a rank had come to the target, or further, before it was one."""
        target = self.aims[1]
        return any(
            self._values[self._passed + k] >= target and self._values[self._writing + k] != target
            for k in map(self._index.__getitem__, self.updating)
        )

    def keep(self, step: int) -> None:
        """Forget all but one step, or all (NONE), between the death of ranks and the next fork."""
        for rank in self.ranks:
            if step == NONE or rank in self.updating:
                for buffer, stamp in enumerate(self.of(rank)):
                    self.close(rank, buffer, stamp if stamp == step else NONE)
        # a rank that was killed may have held the lock
        self._lock = multiprocessing.get_context("fork").Lock()
