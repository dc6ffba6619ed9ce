"""FirstFit: pieces of one block of memory; each takes the lowest free place that fits.

Pure: the arena of a rank (transport/arena.py) and the rehearsal (cost/live.py) place messages by
the same rule; BestFit is that of torch's allocator (rehearsal/reserved.py).
"""

from __future__ import annotations

_PAGE_BYTES = 4096  # pieces are whole pages, so that no two share one


def round_to_pages(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages; at least one page."""
    return max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES


class FirstFit:
    """A block of memory and the pieces taken from it.

    touched: bytes up to the highest address that was ever in use.
    """

    def __init__(self, size: int) -> None:
        """size: free bytes, a multiple of a page."""
        self.touched = 0
        self._free = [(0, size)]  # (start, end), in order, never adjacent
        self._taken: dict[int, int] = {}  # start -> end

    def take(self, num_bytes: int) -> int:
        """Take a free piece of `num_bytes`; return its start.  Raises MemoryError if none
        fits.
        """
        size = round_to_pages(num_bytes)
        k = self._choose(size)
        if k is None:
            raise MemoryError(
                f"no room for a message of {num_bytes:,} bytes: messages in flight and weights that"
                " ranks share fill this rank's part of the shared memory"
            )
        start, end = self._free[k]
        self._free[k : k + 1] = [(start + size, end)] if end - start > size else []
        self._taken[start] = start + size
        self.touched = max(self.touched, start + size)
        return start

    def _choose(self, size: int) -> int | None:
        fitting = (k for k, (start, end) in enumerate(self._free) if end - start >= size)
        return next(fitting, None)

    def give(self, start: int) -> None:
        """Return the piece that begins at `start`: it is free again."""
        end = self._taken.pop(start)
        k = next((k for k, (low, _) in enumerate(self._free) if low > start), len(self._free))
        if k < len(self._free) and self._free[k][0] == end:
            end = self._free.pop(k)[1]
        if k and self._free[k - 1][1] == start:
            k -= 1
            start = self._free.pop(k)[0]
        self._free.insert(k, (start, end))


class BestFit(FirstFit):
    """Pieces of which each takes the smallest free place that fits."""

    def _choose(self, size: int) -> int | None:
        fitting = ((end - start, k) for k, (start, end) in enumerate(self._free))
        return min((each for each in fitting if each[0] >= size), default=(0, None))[1]
