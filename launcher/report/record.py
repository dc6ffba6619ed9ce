"""Record: writes the run's files, and passes each step to the progress display.

The files: recipe.yaml, environment.json, plan.txt, metrics.jsonl, restarts.jsonl, ended.json,
report.json.  It follows the run as a listener does.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

import yaml  # type: ignore[import-untyped]

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.ir.files import name_file, open_more, replace_text
from flowrun.engine.runtime.process.cpu_share import count_seconds
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.trace.model_flops import utilisation
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.listeners.listener import FAILED, PREEMPTED, TAGS, RunInfo
from flowrun.launcher.recipe.schema import ROLLBACK
from flowrun.launcher.report.metric_lines import list_lines_before, open_metrics
from flowrun.launcher.report.progress import Progress, list_steps
from flowrun.launcher.report.report import Report, SkippedSteps, StepLog, StepRecord, numbers
from flowrun.launcher.report.run_environment import describe_environment
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store.checkpoint import Checkpoint, complete, find_all
from flowrun.launcher.store.kept_run import KeptRun
from flowrun.launcher.store.run_files import (
    ENDED,
    ENVIRONMENT,
    LOGS,
    METRICS,
    RECIPE,
    REPORT,
    RESTARTS,
)
from flowrun.launcher.store.run_tokenizer import keep_tokenizer
from flowrun.launcher.terminal.as_json import strict
from flowrun.launcher.terminal.console import STDERR, STDOUT, say

_NO_TARGET = (
    "step {step} has no target: its loss is not a number (null in metrics.jsonl) and its gradients"
    " are 0, as in plain torch"
)


class Record:
    """The record writes what happens to the run's folder, and shows it by `progress`."""

    def __init__(
        self, folder: Path, job: Job, progress: Progress | None, kept: KeptRun | None = None
    ) -> None:
        """folder: of the run.  progress: shows it.  kept: its copy in a store."""
        self.since = count_seconds()  # of the cores, at the beginning
        self.run_folder = folder  # that the hosts of a run may share
        self.folder = folder
        self.kept = kept
        self.job = job
        self.asked = job.recipe  # for all hosts that there may be
        self._plan = ""
        self.progress = progress
        self.steps = StepLog()
        self.validation: Results = {}
        self.evaluated = 0  # steps done then
        self.no_target = False  # a step had a loss that is no number
        self.skipped = SkippedSteps()
        self._begin_at(job.start)
        self._newest = job.start.step if isinstance(job.start, Checkpoint) else 0
        self.restarts = 0
        self._unwritten: list[str] = []  # of RESTARTS: it is the first host that will write there
        self.lost: list[str] = []  # what could not be written
        self.begun = self.agreed = False
        self._metrics: TextIO | None = None
        self._peak_share: tuple[Job, float] | None = None
        self.ended_by = ""  # the callback that has asked for the end
        self.fence: Callable[[], None] = lambda: None  # raises where another has taken the folder

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of this run, oldest first: not those of a run that was gone back on."""
        return [each for each in find_all(self.run_folder) if each.step <= self._newest]

    def begin(self) -> None:
        """Write what is known before the first step.

        A host that waits for others does not: the folder may be that of hosts that train.
        """
        self.begun, self.agreed, folder = True, True, self.folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in (ENDED, REPORT):  # of the run so far: how it ends is to be seen
            (folder / file).unlink(missing_ok=True)
        if not self.first:
            (folder / RESTARTS).unlink(missing_ok=True)
        list_lines_before(folder / METRICS, self.first)  # an error comes before the start
        replace_text(folder / ENVIRONMENT, json.dumps(describe_environment(self.job)) + "\n")
        self._write_job()

    def _write_job(self) -> None:
        if self.begun:
            replace_text(self.folder / RECIPE, self.job.recipe.to_yaml())
            keep_tokenizer(self.job.recipe.data, self.folder)
            if self._plan:
                replace_text(self.folder / "plan.txt", self._plan)

    def _begin_at(self, start: Start | None) -> None:
        self.first, self.ended = (start.step, start.ended) if start else (0, True)

    def share(self, host: int) -> None:
        """Keep to a folder inside that of the run, to which the first host writes.

        host: number of this host; 0: it is the first.
        """
        folder = self.run_folder / f"host{host}" if host else self.run_folder
        if folder != self.folder:
            self._close_files()
            self.folder = folder
            self.folder.mkdir(exist_ok=True)
            (folder / ENDED).unlink(missing_ok=True)  # of the host that was the first before
            self._write_job()

    def write_plan(self, training: Rehearsed, notes: Sequence[str] = ()) -> None:
        """Write and show the plan, with the `notes` that a person should read."""
        lines = (str(training.plan), *(f"note: {note}" for note in notes))
        self._plan = "\n".join(lines) + "\n"
        self._write_job()
        if self.progress:
            self.progress.show_plan(self.job, training)
        for note in notes:
            self.note(note)

    def step(
        self,
        step: int,
        results: Results,
        seconds: float,
        gauges: Mapping[str, float] = MappingProxyType({}),
    ) -> Mapping[str, float]:
        """Record that a step has ended; return its figures by tag (launcher/listeners).

        results: loss and other numbers by name.  seconds: since the step before ended.  gauges:
        what the launcher has read of its ranks, by tag.
        """
        work = self.job.work
        speed = work.speed(seconds)
        norm = results.get("grad_norm", math.nan)
        if "grad_norm" in results and not math.isfinite(norm):
            self.skipped.add([step])
        skipped = int(results.get("skipped_updates", self.skipped.count))
        results = {**results, **self.job.other_rates(step)}
        record = StepRecord(
            step=step,
            loss=results["loss"],
            step_s=seconds,
            speed=speed,
            skipped_updates=skipped,
            others={k: x for k, x in results.items() if k.startswith(("loss/", "lr/"))},
        )
        self.steps.add(record)
        if math.isnan(record.loss) and norm == 0 and not self.no_target:
            self.no_target = True
            self.note(_NO_TARGET.format(step=step))
        rate = self.job.rate(step)
        line = {
            "step": step,
            **results,
            **({"skipped_updates": skipped} if skipped else {}),
            "lr": rate,
            "step_s": seconds,
            "tokens_per_s": speed,
        }
        self._line({**line, **gauges})
        if self.progress:
            self.progress.step(record, rate)
        values = {name: line[name] for name in line if name.split("/")[0] in TAGS} | dict(gauges)
        if (share := self._share_in_a_second()) and seconds > 0:
            values["flop_utilisation"] = share / seconds
        return values

    def _share_in_a_second(self) -> float:
        """Return the model's FLOPs of a step, of the peak of all ranks in a second; 0: unknown."""
        job = self.job
        if self._peak_share is None or self._peak_share[0] is not job:
            plan, dtype = job.training.plan, job.recipe.precision.dtype
            known = job.is_profiled
            found = utilisation(plan, job.strategy.hardware, dtype, 1.0) if known else 0.0
            self._peak_share = job, found
        return self._peak_share[1]

    def write_evaluation(self, step: int, validation: Results) -> None:
        """Record the results of the held-out samples with the weights after `step`."""
        self.validation, self.evaluated = validation, step + 1
        self.job.take_evaluation(step + 1, validation)
        self._line({"step": step, "validation": validation})
        if self.progress:
            self.progress.show_evaluation(step, validation)

    @property
    def reached(self) -> int:
        """Steps of the training that are done and recorded."""
        return self.steps.last.step + 1 if self.steps.last else self.first

    def complete_checkpoint(
        self, step: int, files: Mapping[str, Sequence[int]], busy: Collection[int] = ()
    ) -> Checkpoint:
        """Make the checkpoint of a step count that all ranks have written; return it.

        files: size and checksum of each.  busy: see prune.
        """
        self.fence()
        validation = strict(numbers(self.validation)) if self.evaluated == step else {}
        about = replace(self.job.about(step), validation=validation, files=files)
        partial = checkpoints.partial_folder(self.run_folder, step)
        done = complete(partial, about, self.job.recipe.to_yaml())
        self.prune(done, busy)
        if self.kept:
            self.kept.look()
        self._newest = max(self._newest, step)
        return done

    def prune(self, newest: Checkpoint, busy: Collection[int] = ()) -> None:
        """Remove the checkpoints that are not to stay.  busy: steps of those that are read."""
        train, putting = self.job.recipe.train, self.kept.putting if self.kept else -1
        due = train.save_every if train.on_nonfinite == ROLLBACK else 0
        checkpoints.prune(newest, train.keep, train.keep_best, due, {*busy, putting})

    def add_checkpoint(self, step: int) -> None:
        """Note a checkpoint that the first host has completed."""
        self._newest = max(self._newest, step)

    def go_back(self, start: Start | None, why: Mapping[str, object]) -> None:
        """Forget what new ranks will do again.

        start: where they begin.  why: a line of restarts.jsonl.
        """
        self._close_files()
        self._begin_at(start)
        self.steps.cut(self.first)
        self.skipped.cut(self.first)
        self.restarts += 1
        self._unwritten.append(json.dumps(strict(why)) + "\n")

    def leave_out(self, steps: Sequence[int]) -> None:
        """Count the updates of some steps as left out."""
        self.skipped.add(steps)
        if last := self.steps.last:
            self.steps.newest[-1] = replace(last, skipped_updates=self.skipped.count)

    def go_on_with(self, job: Job, lost: RunError, layout: str) -> None:
        """Record the rest of the run, of a job on fewer ranks.

        lost: why.  layout: how the recipe was changed.
        """
        before, ranks = self.job.recipe.num_ranks, job.recipe.num_ranks
        why = {"where": lost.where, "problem": lost.problem, "reached": self.reached}
        self.job = job
        first = job.start.step if job.start else 0
        self.go_back(job.start, {**why, "first": first, "ranks": ranks, "layout": layout})
        self._write_job()
        self.note(
            f"Ranks keep failing ({lost.where}: {lost.problem.splitlines()[0]}): continuing on"
            f" {ranks} of {before} ranks from step {first}: {layout}"
        )

    def go_on_from(self, start: Start | None, job: Job | None = None) -> None:
        """Begin where all hosts do, before the ranks of this host run.

        start: a checkpoint, or None for the beginning.  job: planned for the hosts that are here.
        """
        self.agreed = True
        self.job = job or self.job
        self.job.start = start
        if isinstance(start, Checkpoint):  # another host may have completed it
            self._newest = max(self._newest, start.step)
        self._close_files()
        self._begin_at(start)
        self.steps.cut(self.first)
        self._write_job()

    def end_store(self, error: BaseException | None = None) -> None:
        """Wait until the run's store, if it has one, has all files.  error: the run ends with it.
        Raises RunError where files are missing there, and there is no other error.
        """
        if self.kept:
            self.kept.end(self.note if error else self.say, error)

    def say(self, text: str) -> None:
        """Show a line about what takes time before the first step."""
        if self.progress:
            self.progress.console.print(text, highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Something that a person should know."""
        if self.progress:
            say(self.progress.console, f"note: {text}", "yellow")

    def write_end(self, status: str, why: str) -> None:
        """Write ended.json: that the run has ended, and is not complete.

        status: preempted, stopped or failed.  why: what asked it to end, or the error.
        """
        if not self.begun:
            return
        about = {"status": status, "why": why, "step": self.reached, "time": time.time()}
        self._write_restarts()
        with contextlib.suppress(OSError):  # a full disk is an error that is shown anyway
            replace_text(self.folder / ENDED, json.dumps(about) + "\n")
        if status == PREEMPTED:
            steps = self.job.recipe.train.steps
            self.note(f"preempted after step {self.reached} of {steps} by {why}; nothing is lost")
        if status == FAILED and (logs := self.run_folder / LOGS).is_dir():
            self.note(f"what each rank printed, with its traceback: {logs}/")

    def advise_resume(self) -> None:
        """Say how to resume a run that failed or was stopped, if that is possible."""
        steps = self.job.recipe.train.steps
        if not (found := find_all(self.folder)):
            return
        if found[-1].step < steps:
            self.note(f"flowrun resume {self.folder} goes on from step {found[-1].step}")
        else:
            self.note(
                f"the checkpoint of step {steps}, the last, is there: flowrun export {self.folder} "
                "writes its weights"
            )

    def write_report(self, report: Report) -> Report:
        """Write and show the report of a run that ended well; return it as it was written."""
        self._write_restarts()
        self.close()
        if reason := STDOUT.lost or STDERR.lost:
            self.lost.append(f"what was printed is cut off: {reason}")
        best = checkpoints.find_best(find_all(self.folder), self.job.recipe.train.keep_best)
        report = replace(
            report,
            ended_by=self.ended_by if self.reached < self.job.recipe.train.steps else "",
            best_step=best.step if best else None,
            notes=(*report.notes, *self.lost),
        )
        replace_text(self.folder / "report.json", report.to_json() + "\n")
        if self.progress:
            self.progress.show_report(report, self.folder)
        if self.skipped.count:
            self.note(
                f"{self.skipped.count} of {self.steps.count} updates were left out, as gradients"
                f" were not finite: step {list_steps(self.skipped.newest, self.skipped.count)}"
            )
        return report

    def _close_files(self) -> None:
        self.close()
        self._metrics = None

    def close(self) -> None:
        """Close files; the folder keeps what was written."""
        if self._metrics is not None:
            self._metrics.close()
        if self.progress:
            self.progress.close()

    def _line(self, line: dict[str, object]) -> None:
        self.fence()
        self._write_restarts()
        with name_file(self.folder / METRICS):
            if self._metrics is None:
                self._metrics = open_metrics(self.folder / METRICS, self.first, self.ended)
            self._metrics.write(json.dumps(strict(line)) + "\n")
            self._metrics.flush()
        if not (self.folder / METRICS).exists():
            raise RunError(
                str(self.folder),
                f"{METRICS if self.folder.exists() else 'the folder of the run'} was removed while"
                " the run was writing to it.",
            )

    def _write_restarts(self) -> None:
        if self._unwritten:
            with open(open_more(self.folder / RESTARTS), "a", encoding="utf-8") as file:
                file.writelines(self._unwritten)
            self._unwritten.clear()

    def lose(self, text: str) -> None:
        """Note what cannot be written; the report has it."""
        self.lost.append(text)
        self.note(text)

    def describe(self) -> RunInfo:
        """Describe the run to listeners."""
        recipe = self.job.recipe
        return RunInfo(
            folder=self.folder,
            name=recipe.name,
            recipe=yaml.safe_load(recipe.to_yaml()) or {},
            first_step=self.first,
            steps=recipe.train.steps,
        )
