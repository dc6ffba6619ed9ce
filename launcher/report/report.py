"""Report: what was foreseen next to what was measured.  It is `report.json` in the run's folder,
and for a person a table (progress.py).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrun.engine.compile import Rehearsed
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.ir.files import DAMAGED
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.trace.model_flops import model_flops, utilisation
from flowrun.engine.trace.step_time import StepTime, measure_steps
from flowrun.engine.trace.stragglers import find_straggler
from flowrun.engine.trace.trace import TraceEvent
from flowrun.launcher.job.job import Job
from flowrun.launcher.store.run_files import REPORT
from flowrun.launcher.terminal.as_json import strict
from flowrun.launcher.terminal.units import seconds

_STEPS_KEPT = 10_000  # the median of seconds is of these
_SKIPPED_KEPT = 1000
READING_SHARE = 0.1  # of a step: readers that add more are named
FAR = 4 / 3  # what is foreseen and what is measured, of a step: the profile does not fit


def numbers(validation: Results) -> dict[str, float]:
    """Drop the lists of the mirrored view."""
    return {name: value for name, value in validation.items() if not isinstance(value, list)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The figures of a step: loss (mean over its samples), seconds since the step before ended,
    units of work a second (Job.work), updates left out so far; others: "loss/NAME" and "lr/NAME" of
    each other update that it had.
    """

    step: int
    loss: float
    step_s: float
    speed: float
    skipped_updates: int = 0
    others: Mapping[str, float] = field(default_factory=dict)

    def show(self, tag: str, value: float, digits: str) -> str:
        """Write a number of the first update, and that of each other by its name."""
        own = [(k.partition("/")[2], x) for k, x in self.others.items() if k.startswith(f"{tag}/")]
        return ", ".join(f"{name} {x:{digits}}" for name, x in [(tag, value), *own])


@dataclass
class StepLog:
    """The steps of a run, in the same memory for any number of them.

    count: steps so far.  first: the first of them.  newest: the last ones.
    """

    count: int = 0
    first: StepRecord | None = None
    newest: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    @property
    def last(self) -> StepRecord | None:
        """The newest step, if it is kept."""
        return self.newest[-1] if self.newest else None

    def add(self, record: StepRecord) -> None:
        self.count += 1
        self.first = self.first or record
        self.newest.append(record)

    def cut(self, step: int) -> None:
        """Forget `step` and those after it, which will be done again."""
        if self.last:
            self.count = max(0, self.count - max(0, self.last.step + 1 - step))
        if self.first and self.first.step >= step:
            self.first = None
        while self.last and self.last.step >= step:
            self.newest.pop()

    def settled_s(self) -> float:
        """Median of the seconds of a step, without the first tenth of the run; 0 without steps."""
        forgotten = self.count - len(self.newest)
        settled = list(self.newest)[max(0, self.count // 10 - forgotten) :]
        return statistics.median(record.step_s for record in settled) if settled else 0.0


@dataclass
class SkippedSteps:
    """The steps whose update was left out: their number, and the newest of them, in order."""

    count: int = 0
    newest: list[int] = field(default_factory=list)

    def add(self, steps: Iterable[int]) -> None:
        """Add steps that may be here already."""
        new = {*steps}.difference(self.newest)
        self.count += len(new)
        self.newest = sorted((*self.newest, *new))[-_SKIPPED_KEPT:]

    def cut(self, step: int) -> None:
        """Forget `step` and those after it, which will be done again."""
        kept = [each for each in self.newest if each < step]
        self.count -= len(self.newest) - len(kept)
        self.newest = kept


@dataclass(frozen=True)
class Log:
    """The log holds what a run measured.

    steps: of the whole run.
    validation: mean of each result over the held-out samples, at the end; mirrored view: of each
    rank too.
    peak_bytes, sent_bytes: by rank.
    peak_bytes: of live tensors.  process_bytes: of anonymous memory, by rank: with what allocator,
    transport and libraries keep.
    waited_s, read_s: by rank, seconds of a step for which it waited for other ranks, for samples.
    notes: what each rank did in its last steps (engine.trace), on the first rank's clock.
    restarts: how often ranks were started again.
    measured_steps: steps since the last start of ranks, which sent_bytes are of; None: all.
    others: share of this host's cores that other programs had.
    """

    steps: StepLog
    validation: Results
    peak_bytes: dict[int, int]
    sent_bytes: dict[int, int]
    process_bytes: dict[int, int] = field(default_factory=dict)
    waited_s: dict[int, float] = field(default_factory=dict)
    read_s: dict[int, float] = field(default_factory=dict)
    notes: Mapping[int, Sequence[TraceEvent]] = field(default_factory=dict)
    restarts: int = 0
    measured_steps: int | None = None
    others: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a run: its losses, and what was foreseen next to what was measured.

    Attributes:
        name: the recipe's.
        ranks: number of ranks.
        steps: number of steps of this run.
        first_loss: loss of the first step.
        last_loss: loss of the last step.
        validation: loss and metrics of the held-out samples, by name.
        tokens_per_s: speed in `unit` per second.
        unit: "tokens", or "samples" if these are no sequences of tokens.
        foreseen: step_s (seconds), bubble (share of a step, by stage), peak_bytes and bound_bytes
            (by rank, see Rehearsal), sent_bytes (of all ranks, in a step).
        measured: step_s, peak_bytes, process_bytes (by rank), sent_bytes, waited_s,
            read_s (by rank: of a step, for other ranks and for samples; on CPUs), others (the share
            of this host's cores that other programs had, if ranks lacked it); foreseen and measured
            also have utilisation, the share of the machine's peak, if the profile is the machine's.
        notes: lines of the plan that a reader should know.
        first_step: 0 unless the run was resumed.
        skipped_updates: updates that were left out, as gradients were not finite: by loss scaling
            since the training began, else in this run.
        step_times: parts of a step's time, by rank (engine.trace, processes only).
        model_flops: floating point operations of the model in a step, all ranks together.
        advice: what to do if the step is far from what was foreseen; else empty.
        capture_check_s: seconds of the comparison of the captured graph with the model
            (engine.check_capture).
        restarts: how often ranks were started again (launch.restarts).
        best_step: steps of the checkpoint that is best by train.keep_best.
        ended_by: the callback that ended the run before its last step.
    """

    name: str
    ranks: int
    steps: int
    first_loss: float
    last_loss: float
    validation: Results
    tokens_per_s: float
    unit: str
    foreseen: dict[str, Any]
    measured: dict[str, Any]
    notes: tuple[str, ...] = ()
    first_step: int = 0
    skipped_updates: int = 0
    step_times: tuple[StepTime, ...] = ()
    model_flops: float = 0.0
    advice: str = ""
    capture_check_s: float | None = None
    restarts: int = 0
    best_step: int | None = None
    ended_by: str = ""

    @staticmethod
    def of(job: Job, training: Rehearsed, log: Log) -> Report:
        """Put the rehearsal of `training` next to the log of the job.  Step time is the median
        without the first tenth.
        """
        plan, rehearsal = training.plan, training.rehearsal
        first, last, step_s = log.steps.first, log.steps.last, log.steps.settled_s()
        assert first and last, "a run has a step"
        ranks = sorted(rank for placement in plan.placements for rank in placement.ranks)
        foreseen, measured = _list_foreseen(training, ranks), _list_measured(log, ranks)
        slow = find_straggler(plan, log.waited_s, step_s) if job.device_type == "cpu" else None
        shipped = CPU if job.strategy.hardware.name == CPU else ""  # no other was named
        loaded, advice = job.lacks_cores(log.others), ""
        if loaded:
            measured["others"] = log.others
        elif job.is_foreseeable:
            read_s = max(log.read_s.values(), default=0.0)
            advice = advise(shipped, rehearsal.step_s, step_s, read_s)
        if job.is_profiled:
            hardware, dtype = job.strategy.hardware, job.recipe.precision.dtype
            for found, step in ((foreseen, rehearsal.step_s), (measured, step_s)):
                found["utilisation"] = utilisation(plan, hardware, dtype, step)
        return Report(
            name=job.recipe.name,
            ranks=plan.num_ranks,
            steps=log.steps.count,
            first_loss=first.loss,
            last_loss=last.loss,
            validation=log.validation,
            tokens_per_s=job.work.speed(step_s),
            unit=job.work.unit,
            foreseen=foreseen,
            measured=measured,
            notes=(*plan.notes, *([str(slow)] if slow else [])),
            first_step=first.step,
            skipped_updates=last.skipped_updates,
            step_times=measure_steps(plan, log.notes),
            model_flops=model_flops(plan),
            advice=advice,
            capture_check_s=job.plans.check.seconds if job.plans.check else None,
            restarts=log.restarts,
        )

    def to_json(self) -> str:
        return json.dumps(strict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Report:
        found = json.loads(text)
        losses = {k: math.nan for k in ("first_loss", "last_loss") if found[k] is None}
        return Report(**found | losses)


def read_complete(folder: Path, steps: int) -> Report | None:
    """Return the report of a run that has done all of its steps, or that a callback has ended; None
    of any other.

    folder: of the run.  steps: their number.
    """
    with suppress(OSError, *DAMAGED):
        report = Report.from_json((folder / REPORT).read_text())
        return report if report.ended_by or report.first_step + report.steps >= steps else None
    return None


def advise(profile: str, foreseen_s: float, measured_s: float, read_s: float) -> str:
    """Say what to do where a step is far from what was foreseen; empty where it is near.

    profile: the name of one that comes with flowrun; "" of one that is this machine's.
    foreseen_s, measured_s: seconds of a step.  read_s: what of it a rank waited for samples.
    """
    ratio = measured_s / foreseen_s
    if 1 / FAR <= ratio <= FAR:
        return ""
    found = f"a step takes {ratio:.2g} x as long as "
    if ratio > FAR and read_s > READING_SHARE * measured_s:
        return (
            f"{found}foreseen; a rank waits {seconds(read_s)} of it for samples: prepare them"
            " beforehand, or let processes make them (launch.data_workers)"
        )
    return profile and (
        f"{found}hardware={profile} foresees; flowrun calibrate measures this machine (3 minutes)"
    )


def _list_foreseen(training: Rehearsed, ranks: Sequence[int]) -> dict[str, object]:
    rehearsal = training.rehearsal
    stages = {str(rank): training.plan.stage_of(rank) for rank in ranks}
    return {
        "step_s": rehearsal.step_s,
        "bubble": list(rehearsal.bubble),
        "peak_bytes": {rank: rehearsal.peak_bytes[k] for rank, k in stages.items()},
        "bound_bytes": {rank: rehearsal.bound_bytes[k] for rank, k in stages.items()},
        "sent_bytes": rehearsal.sent_bytes,
    }


def _list_measured(log: Log, ranks: Sequence[int]) -> dict[str, object]:
    return {
        "step_s": log.steps.settled_s(),
        "peak_bytes": {str(r): log.peak_bytes.get(r, 0) for r in ranks},
        "process_bytes": {str(r): log.process_bytes.get(r, 0) for r in ranks},
        "sent_bytes": sum(log.sent_bytes.values()) / max(1, log.measured_steps or log.steps.count),
        "waited_s": {str(r): log.waited_s[r] for r in ranks if r in log.waited_s},
        "read_s": {str(r): log.read_s[r] for r in ranks if r in log.read_s},
    }
