"""FirstFit: pieces of one stretch of memory, the lowest that fits first.  Pure: the arena of a rank
(transport/arena.py) and the rehearsal (cost/live.py) place messages alike.
"""

from __future__ import annotations

_ALIGNMENT = 4096  # of pieces, in bytes: no two share a page


def round_to_pages(num_bytes: int) -> int:
    """Bytes of a piece of so many."""
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT


class FirstFit:
    """touched: bytes up to the highest that was ever in use."""

    def __init__(self, size: int) -> None:
        """size: in bytes, a multiple of a page."""
        self.touched = 0
        self._free = [(0, size)]  # (start, end), in order, never adjacent
        self._taken: dict[int, int] = {}  # start -> end

    def take(self, num_bytes: int) -> int:
        """The start of a piece that nobody uses: the lowest that fits.  Raises MemoryError."""
        size = round_to_pages(num_bytes)
        for k, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[k : k + 1] = [(start + size, end)] if end - start > size else []
                self._taken[start] = start + size
                self.touched = max(self.touched, start + size)
                return start
        raise MemoryError(
            "messages under way, and weights that ranks share, hold more than this rank's share of"
            f" memory: {num_bytes:,} bytes"
        )

    def give(self, start: int) -> None:
        """The piece is free again."""
        end = self._taken.pop(start)
        k = next((k for k, (low, _) in enumerate(self._free) if low > start), len(self._free))
        if k < len(self._free) and self._free[k][0] == end:
            end = self._free.pop(k)[1]
        if k and self._free[k - 1][1] == start:
            k -= 1
            start = self._free.pop(k)[0]
        self._free.insert(k, (start, end))
