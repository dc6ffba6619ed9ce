"""search: the best candidates by branch and bound; pure but for the plans that it asks for.

Best first by what is expected of a candidate; nothing is left out unless its bound says that it
cannot be among the best.  A branch is opened (its layout decided) before its candidates are
planned, and candidates that lack memory are followed by smaller ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flowrun.engine.compile import longest_equal_step
from flowrun.launcher.place.outcome import Bound, Outcome
from flowrun.launcher.place.space import Branch, Candidate
from flowrun.launcher.terminal.units import seconds, size

SHOWN = 10


class PlanSource(Protocol):
    """The source answers what the search asks of the compiler."""

    def branches(self) -> Iterable[tuple[Branch, Bound]]:
        """All, with what is known before any layout."""

    def open(self, branch: Branch) -> Iterable[tuple[Candidate, Bound]]:
        """The candidates of a branch; none if it cannot be compiled."""

    def smaller(self, candidate: Candidate) -> Iterable[Candidate]:
        """Yield candidates to try if this one lacks memory."""

    def plan(self, candidate: Candidate) -> Outcome:
        """Compile and rehearse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResult:
    """outcomes: of all that was planned, best first.  left: candidates and branches that were not
    planned because their bound is too slow or too large; unseen: because auto.plans or auto.seconds
    was reached, and of these the least bound, in seconds, and the least that is expected.  skipped:
    branches that were not looked at, whatever they take.  late: auto.seconds
    was reached.
    """

    outcomes: tuple[Outcome, ...]
    left: int = 0
    unseen: int = 0
    unseen_s: float = 0.0
    expected_s: float = 0.0
    skipped: int = 0
    late: bool = False

    @property
    def best(self) -> Outcome | None:
        """The simplest of those that fit and are nearly as fast as the fastest of these.  One that
        was planned whole goes before all that are extrapolated: it was the best of them.
        """
        fit = [outcome for outcome in self.outcomes if outcome.fits]
        fit = [outcome for outcome in fit if not outcome.extrapolated] or fit
        limit = longest_equal_step(fit[0].step_s) if fit else 0.0
        near = [outcome for outcome in fit if outcome.step_s <= limit]
        return min(near, key=lambda o: (*simplicity(o.candidate), *order(o)), default=None)

    @property
    def next(self) -> Outcome | None:
        """Return the fastest of those that fit and are extrapolated."""
        return next((o for o in self.outcomes if o.fits and o.extrapolated), None)

    @property
    def closest(self) -> Outcome | None:
        """Return the one that lacks least of those that lack memory."""
        lacking = [outcome for outcome in self.outcomes if outcome.missing]
        return min(lacking, key=lambda o: (o.missing, o.step_s), default=None)

    def __str__(self) -> str:
        """The winner in a line."""
        best = self.best
        assert best is not None, "place() raises where nothing fits"
        return (
            f"placed: {best.candidate}; foreseen {seconds(best.step_s)} a step,"
            f" {size(best.bytes)} a rank. {self.coverage}"
        )

    @property
    def coverage(self) -> str:
        """Say what was planned and what was not, and what that proves."""
        planned, left = sum(not outcome.problem for outcome in self.outcomes), self.left
        failed = len(self.outcomes) - planned
        text = f"{planned} candidates planned"
        text += f", {failed} cannot be compiled" if failed else ""
        text += f"; {self.skipped} groups are not looked at" if self.skipped else ""
        if left:
            text += f"; {left} groups or candidates left out: their least time or memory is more"
        best = self.best
        if not self.unseen or best is None:
            return f"{text}. No other is faster."
        gap = max(0.0, best.step_s / self.unseen_s - 1) if self.unseen_s else 0.0
        limit = "auto.seconds" if self.late else "auto.plans"
        return (
            f"{text}; {self.unseen} are not planned ({limit}): none takes less than"
            f" {seconds(self.unseen_s)}, so that the best is at most {gap:.0%} above the best"
            f" possible; {seconds(self.expected_s)} and more are expected."
        )

    def instead(self, estimate: Outcome, whole: Outcome) -> PlacementResult:
        """Replace what was extrapolated for a candidate by its whole plan."""
        kept = (each for each in self.outcomes if each is not estimate)
        outcomes = (*kept, replace(whole, estimate=estimate))
        return replace(self, outcomes=tuple(sorted(outcomes, key=order)))


def search(
    source: PlanSource, limit: int, most: int, shown: int = SHOWN, until: float = math.inf
) -> PlacementResult:
    """Search the candidates of a source by branch and bound.

    limit: bytes of a rank, 0: not limited.  most: largest number of plans.  shown: the number of
    best candidates that must be sure.  until: a moment of time.monotonic, from which
    on only a first candidate that fits is looked for.

    If nothing fits, half as many plans again look for what lacks least.
    """
    waiting = [_Open(*each) for each in source.branches()]
    outcomes: list[Outcome] = []
    left = 0
    for by_time in (True, False):
        kept: list[_Open] = []
        plans = most if by_time else most + most // 2
        while waiting and len(outcomes) < plans and not _is_late(until, outcomes):
            promise = _expect(outcomes) if by_time else lambda item: item.bound.bytes
            item = waiting.pop(min(range(len(waiting)), key=lambda k: promise(waiting[k])))
            if _hopeless(item.bound, outcomes, limit, shown, by_time):
                kept.append(item)
            else:
                waiting += _look_at(item, source, outcomes)
        left = len(kept)
        if not by_time or not limit or any(outcome.fits for outcome in outcomes):
            break
        waiting += kept
    return PlacementResult(
        outcomes=tuple(sorted(outcomes, key=order)),
        left=left,
        unseen=len(waiting),
        unseen_s=min((item.bound.seconds for item in waiting), default=0.0),
        expected_s=min(map(_expect(outcomes), waiting), default=0.0),
        late=time.monotonic() >= until,
    )


def _is_late(until: float, outcomes: Sequence[Outcome]) -> bool:
    return time.monotonic() >= until and any(outcome.fits for outcome in outcomes)


def _look_at(item: _Open, source: PlanSource, outcomes: list[Outcome]) -> list[_Open]:
    """Open a branch, or plan a candidate and add its outcome; return what that leads to."""
    if isinstance(item.what, Branch):
        return [_Open(*each) for each in source.open(item.what)]
    outcome = replace(source.plan(item.what), expected_s=item.bound.expected_s)
    outcomes.append(outcome)
    smaller = source.smaller(item.what) if outcome.missing else ()
    return [_Open(each, item.bound) for each in smaller]


def order(outcome: Outcome) -> tuple[bool, bool, float, int, tuple[int, ...]]:
    """Order outcomes: those that fit first, by time, then by memory; failed ones last."""
    simple = simplicity(outcome.candidate)
    return bool(outcome.problem), bool(outcome.missing), outcome.step_s, outcome.bytes, simple


def simplicity(candidate: Candidate) -> tuple[int, ...]:
    """The less of it the simpler."""
    branch, asks = candidate.branch, candidate.in_flight != "auto"  # what a recipe has by itself
    return len(candidate.recompute), branch.stages, candidate.zero, branch.micro_batches, asks


def _hopeless(bound: Bound, outcomes: list[Outcome], limit: int, shown: int, by_time: bool) -> bool:
    """True if nothing behind the bound can be among the best."""
    if not by_time:
        lacks = [outcome.missing for outcome in outcomes if outcome.missing]
        return bool(lacks) and bound.bytes - limit >= min(lacks)
    times = sorted(outcome.step_s for outcome in outcomes if outcome.fits)
    too_slow = len(times) >= shown and bound.seconds >= times[shown - 1]
    return too_slow or bool(limit and bound.bytes > limit)


@dataclass(frozen=True, slots=True)
class _Open:
    """A branch or a candidate that has not been looked at."""

    what: Branch | Candidate
    bound: Bound


def _expect(outcomes: list[Outcome]) -> Callable[[_Open], float]:
    """About the seconds that an item takes: what was expected, corrected by what plans of the same
    grid came to; of a grid without plans by the best that another came to: each that may be good is
    tried before many of one.
    """
    slower: dict[object, list[float]] = {}
    for outcome in outcomes:
        if outcome.expected_s and not outcome.problem:
            ratio = outcome.step_s / outcome.expected_s
            slower.setdefault(outcome.candidate.branch.grid, []).append(ratio)
    factor = {grid: statistics.mean(each) for grid, each in slower.items()}
    of_all = min(factor.values(), default=1.0)

    def expected(item: _Open) -> float:
        branch = item.what if isinstance(item.what, Branch) else item.what.branch
        return item.bound.expected_s * factor.get(branch.grid, of_all)

    return expected
