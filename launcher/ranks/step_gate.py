"""The step gate: all ranks of a run come to rest after the same step, at whatever moment that is
asked for.

A rank asks the gate before it begins a step.  To halt the run is to freeze the gates of all hosts,
so that ranks that ask wait; to take the largest number of steps that any rank has begun; and to
open the gates again with that as the halt.  Every rank does the steps up to it, for some rank has
begun them and needs the others, and is refused the next one.  So no step is done twice or half.

The numbers lie in memory that the ranks of a host and their launcher share, behind one lock: an
ask is two stores a step.
"""

from __future__ import annotations

import mmap
import multiprocessing
import threading
from collections.abc import MutableSequence
from contextlib import AbstractContextManager
from typing import Any

from flowrun.launcher.ranks.rank_events import COMPLETES

_HALT, _ENDS, _RANKS = 0, 1, 2  # where the numbers lie; two a rank follow
_PATIENCE_S = 5.0  # a rank holds the lock for a microsecond, unless it was killed within


class StepGate:
    """The gate of the ranks of one host, as seen by their launcher.

    numbers: the halt, whether the run ends there (ENDS, COMPLETES); then for each rank the steps
    that it has begun, and the halt that it has gone on from.  lock: guards them.
    """

    def __init__(
        self, numbers: MutableSequence[int] | memoryview[int], lock: Any, first: int = 0
    ) -> None:
        self.numbers = numbers
        self.lock = lock
        for k in range(len(numbers)):
            numbers[k] = first
        numbers[_ENDS] = False

    @staticmethod
    def make_shared(num_ranks: int, first: int) -> StepGate:
        """Return a gate that processes forked from this one share.  first: steps done before."""
        size = _RANKS + 2 * num_ranks
        numbers = memoryview(mmap.mmap(-1, 8 * size)).cast("q")
        return StepGate(numbers, multiprocessing.get_context("fork").Lock(), first)

    @staticmethod
    def of_threads(num_ranks: int, first: int) -> StepGate:
        """Return a gate for this process alone.  first: steps done before."""
        return StepGate([0] * (_RANKS + 2 * num_ranks), threading.Lock(), first)

    @property
    def begun(self) -> int:
        """The steps that some rank has begun."""
        return max(self.numbers[_RANKS::2])

    @property
    def is_clear(self) -> bool:
        """True if every rank has gone on from the last halt, so that there may be another."""
        return min(self.numbers[_RANKS + 1 :: 2]) == self.numbers[_HALT]

    def freeze(self, within_s: float = _PATIENCE_S) -> bool:
        """Let ranks that ask wait, until `open`; False if a rank asks for longer than `within_s`:
        it was killed while it waited.
        """
        return bool(self.lock.acquire(timeout=within_s))

    def open(self, halt: int | None = None, ends: int = 0) -> None:
        """Let ranks ask again.

        halt: the step after which all rest, the largest `begun` of all hosts; None: none does.
        ends: they end there, see ENDS and COMPLETES; 0: they go on from it.
        """
        if halt is not None:
            self.numbers[_HALT], self.numbers[_ENDS] = halt, ends
        self.lock.release()

    @property
    def completes(self) -> bool:
        """True if the run is complete at the halt."""
        return self.numbers[_ENDS] == COMPLETES

    def go_on(self) -> bool:
        """Let all ranks pass the halt at which they rest; False if the run ends there."""
        ranks = range((len(self.numbers) - _RANKS) // 2)
        return all([self.of_rank(rank).go_on() for rank in ranks])

    def of_rank(self, rank: int) -> RankGate:
        """Return what rank number `rank` of this host asks."""
        return RankGate(self.numbers, self.lock, _RANKS + 2 * rank)


class RankGate:
    """The gate as seen by a rank: two numbers of its own at `place`."""

    def __init__(
        self,
        numbers: MutableSequence[int] | memoryview[int],
        lock: AbstractContextManager[Any],
        place: int,
    ) -> None:
        self._numbers = numbers
        self._lock = lock
        self._begun, self._passed = place, place + 1

    @property
    def begun(self) -> int:
        """The steps that this rank has begun: once refused, the halt."""
        return self._numbers[self._begun]

    def may_begin(self, steps: int) -> bool:
        """Return whether the rank may begin the last of `steps` steps; if not, it comes to rest."""
        numbers = self._numbers
        with self._lock:
            halted = numbers[_ENDS] or numbers[self._passed] != numbers[_HALT]
            if halted and steps > numbers[_HALT]:
                return False
            numbers[self._begun] = steps
            return True

    def go_on(self) -> bool:
        """Pass the halt at which the rank rests; False if the run ends there."""
        with self._lock:
            self._numbers[self._passed] = self._numbers[_HALT]
            return not self._numbers[_ENDS]
