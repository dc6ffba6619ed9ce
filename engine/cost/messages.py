"""Messages: the place in shared memory of every message of a rank, while a plan is rehearsed.

The loop's thread of each reader reads a message between its acts, and the place is free once the
writer has been notified, between its own acts (transport/shared_memory.py, host_peers.py).
"""

from __future__ import annotations

from flowrun.engine.cost.first_fit import FirstFit, round_to_pages

_ACTS_UNTIL_FREE = 2  # acts of compute that end first: one of the reader, then one of the writer


class Messages:
    """The messages of one rank."""

    def __init__(self) -> None:
        self._arena = FirstFit(1 << 60)
        self._under_way: dict[int, int] = {}  # actor -> where its message lies
        self._done: list[tuple[int, int]] = []  # (where it lies, acts to come)
        self.largest: dict[int, int] = {}  # actor -> bytes of its largest message

    @property
    def touched(self) -> int:
        """Bytes of the arena that were ever in use: its pages stay."""
        return self._arena.touched

    def begin(self, actor: int, num_bytes: int) -> None:
        """Record that an actor begins to communicate, and writes a message of `num_bytes`."""
        if num_bytes:
            self._under_way[actor] = self._arena.take(num_bytes)
            self.largest[actor] = max(round_to_pages(num_bytes), self.largest.get(actor, 0))

    def end(self, actor: int) -> None:
        if actor in self._under_way:
            self._done.append((self._under_way.pop(actor), _ACTS_UNTIL_FREE))

    def end_compute(self) -> None:
        for start in [start for start, acts in self._done if acts == 1]:
            self._arena.give(start)
        self._done = [(start, acts - 1) for start, acts in self._done if acts > 1]

    def moment(self) -> tuple[object, ...]:
        """Return everything that decides where the next message lies."""
        return tuple(sorted(self._under_way.items())), tuple(self._done)
