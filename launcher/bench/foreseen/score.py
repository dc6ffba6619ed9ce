"""Published and foreseen figures -> errors and rank correlation.  Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flowrun.launcher.bench.foreseen.published import Foreseen, PublishedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredFigure:
    """A published figure and the foreseen one.

    row: "table/row".  foreseen: None if the row could not be planned; problem says why.
    """

    table: str
    row: str
    unit: str
    published: float
    foreseen: float | None = None
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Relative: 0.1 is a tenth too much."""
        return None if self.foreseen is None else self.foreseen / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one unit of one table: how well it was foreseen.

    rank: Spearman's correlation; None below 3 rows, or where all are alike.  error: the median of
    the errors without their signs.  ranks_hold, errors_hold: whether the suite's bounds are met.
    """

    table: str
    unit: str
    rows: int
    rank: float | None
    error: float
    ranks_hold: bool | None
    errors_hold: bool


def score(
    suite: Foreseen, table: PublishedTable, unit: str, lines: Sequence[ScoredFigure]
) -> Score | None:
    """Score the lines of a table and unit by the suite's bounds; None if none could be planned."""
    pairs = points(lines, table.name, unit)
    if not pairs:
        return None
    rank = spearman(*zip(*pairs, strict=True))
    error = statistics.median(abs(foreseen / published - 1) for published, foreseen in pairs)
    return Score(
        table=table.name,
        unit=unit,
        rows=len(pairs),
        rank=rank,
        error=error,
        ranks_hold=None if rank is None else rank >= suite.rank_at_least,
        errors_hold=error <= suite.error_at_most,
    )


def points(lines: Sequence[ScoredFigure], table: str, unit: str) -> list[tuple[float, float]]:
    """Published and foreseen figures of the rows that could be planned."""
    return [
        (line.published, line.foreseen)
        for line in lines
        if (line.table, line.unit) == (table, unit) and line.foreseen is not None
    ]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Correlation of the ranks of two lists of equal length, ties sharing the mean of theirs
    (Spearman 1904); None below 3 pairs, or if a list is all alike.
    """
    if len(one) < 3 or len({*one}) == 1 or len({*other}) == 1:
        return None
    return statistics.correlation(ranks(one), ranks(other))


def ranks(values: Sequence[float]) -> list[float]:
    """Place of each value among all, from 1; equal values share the mean of their places."""
    return [sum(v < w for v in values) + (values.count(w) + 1) / 2 for w in values]
