"""Messages: where what a rank writes for others lies in shared memory, while a plan is rehearsed.

A message is read by the loop's thread of each reader, between its acts, and its place is free once
the writer has heard of it, between its own (transport/shared_memory.py, neighbours.py).
"""

from __future__ import annotations

from flowrun.engine.cost.first_fit import FirstFit

_LATER = 2  # acts of compute that end before the place is free: the reader's, then the writer's


class Messages:
    """Of one rank."""

    def __init__(self) -> None:
        self._arena = FirstFit(1 << 60)
        self._under_way: dict[int, int] = {}  # actor -> where its message lies
        self._done: list[tuple[int, int]] = []  # (where it lies, acts to come)

    @property
    def touched(self) -> int:
        """Bytes of the arena that were ever in use: its pages stay."""
        return self._arena.touched

    def begin(self, actor: int, num_bytes: int) -> None:
        """Communication begins, and writes so much."""
        if num_bytes:
            self._under_way[actor] = self._arena.take(num_bytes)

    def end(self, actor: int) -> None:
        """It is done."""
        if actor in self._under_way:
            self._done.append((self._under_way.pop(actor), _LATER))

    def end_compute(self) -> None:
        """An act of compute has ended."""
        for start in [start for start, acts in self._done if acts == 1]:
            self._arena.give(start)
        self._done = [(start, acts - 1) for start, acts in self._done if acts > 1]

    def moment(self) -> tuple[object, ...]:
        """All that decides where the next lies."""
        return tuple(sorted(self._under_way.items())), tuple(self._done)
