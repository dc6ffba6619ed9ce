"""Samples -> Lines: medians, minima, ratios pair by pair, bounds.  Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrun.launcher.bench.foreseen.score import ScoredFigure
from flowrun.launcher.bench.process import Sample
from flowrun.launcher.bench.suite import FLOWRUN, Run, Suite, round_of

Samples = Mapping[int, Sample]  # by round, of runs that ended well


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended.  round: from 0.  key: Run.key.  wall_s: with its start."""

    round: int
    key: tuple[str, str, str, str]
    sample: Sample
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """A line: one side of an experiment, over all rounds.

    median_s, min_s: of a step; None if no run ended well, problem then says why.
    ratio: flowrun's time over the peer's, round by round, then the median; at_most: its bound.
    efficiency (of flowrun): time of one rank over ranks x time, in the same way; at_least: its
    bound.
    peak_bytes: of the process that took most.  sent_bytes: of all ranks, a step; per_s: units of
    work a second, by the median.  utilisation: of the peak of the ranks' devices, what the model's
    products come to (engine/trace/model_flops.py).  foreseen_s: of a step, by the plan.  These four
    of flowrun alone.
    losses_apart: largest relative difference between the peer's and flowrun's.
    agree: whether that is within the suite's tolerance; None where there is nothing to compare.
    """

    experiment: str
    title: str
    side: str
    mode: str
    setting: str
    rounds: int = 0
    median_s: float | None = None
    min_s: float | None = None
    ratio: float | None = None
    at_most: float | None = None
    efficiency: float | None = None
    at_least: float | None = None
    peak_bytes: int | None = None
    sent_bytes: float | None = None
    per_s: float | None = None
    unit: str = ""
    utilisation: float | None = None
    foreseen_s: float | None = None
    losses_apart: float | None = None
    agree: bool | None = None
    problem: str = ""

    @property
    def holds(self) -> bool | None:
        """Return whether the bound of this line holds; None without a bound or a measurement."""
        if self.ratio is not None and self.at_most is not None:
            return self.ratio <= self.at_most
        if self.efficiency is not None and self.at_least is not None:
            return self.efficiency >= self.at_least
        return None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The results of a suite, and the folder that has them in full.

    measured: a line a side of an experiment.  foreseen: a figure of a published table each.
    """

    folder: Path
    measured: tuple[ResultLine, ...] = ()
    foreseen: tuple[ScoredFigure, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether every row could be run or planned, with the losses of its peers."""
        problems = [each.problem for each in self.measured]
        problems += [each.problem for each in self.foreseen]
        return not any(problems) and all(each.agree is not False for each in self.measured)


def lines(suite: Suite, records: Sequence[FinishedRun]) -> tuple[ResultLine, ...]:
    """A line for each run of a round, in order: what efficiency is counted from too."""
    return tuple(_line(suite, run, records) for run in round_of(suite))


def _line(suite: Suite, run: Run, records: Sequence[FinishedRun]) -> ResultLine:
    def well(experiment: str, side: str, setting: str = "") -> Samples:
        key = experiment, side, run.mode, setting
        return {r.round: r.sample for r in records if r.key == key and not r.sample.problem}

    experiment, mine = (
        suite.experiments[run.experiment],
        well(run.experiment, run.side, run.setting),
    )
    problems = [r.sample.problem for r in records if r.key == run.key and r.sample.problem]
    line = ResultLine(
        experiment=run.experiment,
        title=experiment.title or run.experiment,
        side=run.side,
        mode=run.mode,
        setting=run.setting,
        rounds=len(mine),
        problem=problems[-1] if problems else "",
    )
    line = _add_figures(line, suite, list(mine.values()))
    if run.side == FLOWRUN:
        counts = experiment.efficiency is not None
        alone = well(suite.efficiency_of, FLOWRUN) if counts else {}
        gain = ratio(suite, alone, mine)
        efficiency = None if gain is None else gain / run.ranks
        return replace(line, efficiency=efficiency, at_least=experiment.efficiency or None)
    ours = well(run.experiment, FLOWRUN)
    apart = [distance(ours[k].losses, mine[k].losses) for k in mine.keys() & ours.keys()]
    allowed = experiment.loss_tolerance
    allowed = suite.loss_tolerance if allowed is None else allowed
    return replace(
        line,
        ratio=ratio(suite, ours, mine),
        at_most=experiment.at_most.get(run.setting or run.side),
        losses_apart=max(apart, default=None),
        agree=max(apart) <= allowed if apart else None,
    )


def _add_figures(line: ResultLine, suite: Suite, samples: Sequence[Sample]) -> ResultLine:
    """Add figures over the steps of all rounds but for the first of each."""
    if not samples:
        return line
    steps = [seconds for sample in samples for seconds in step_seconds(suite, sample)]
    sent = [sample.sent_bytes for sample in samples if sample.sent_bytes is not None]
    median_s, last = statistics.median(steps), samples[-1]
    return replace(
        line,
        median_s=median_s,
        min_s=min(steps),
        peak_bytes=round(statistics.median(sample.peak_bytes for sample in samples)),
        sent_bytes=statistics.median(sent) if sent else None,
        per_s=last.work / median_s if last.work is not None else None,
        unit=last.unit,
        utilisation=None if last.at_peak_s is None else last.at_peak_s / median_s,
        foreseen_s=last.foreseen_s,
    )


def ratio(suite: Suite, over: Samples, under: Samples) -> float | None:
    """Divide the step time of `over` by that of `under` in each round that both have; the median.

    suite: says which steps count.
    """
    ratios = [
        statistics.median(step_seconds(suite, over[k]))
        / statistics.median(step_seconds(suite, under[k]))
        for k in over.keys() & under.keys()
    ]
    return statistics.median(ratios) if ratios else None


def step_seconds(suite: Suite, sample: Sample) -> tuple[float, ...]:
    return sample.step_s[suite.warmup :]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest relative difference of two runs' losses; infinite if they have not as many, or if one
    is no number.
    """
    if len(one) != len(other) or not all(map(math.isfinite, (*one, *other))):
        return math.inf
    return max((abs(a - b) / (abs(b) or 1.0) for a, b in zip(one, other, strict=True)), default=0.0)
