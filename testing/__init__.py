"""For tests of one's own: prove(op, rows, samples)."""

from flowrun.testing.prove import RowError, prove

__all__ = ["RowError", "prove"]
