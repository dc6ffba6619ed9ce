"""Help tests of a user's own: prove(op, rows, samples) tries rows on simulated ranks."""

from flowrun.testing.prove import RowError, prove

__all__ = ["RowError", "prove"]
