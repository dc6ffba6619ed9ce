"""Show a run to a person: the plan in a few lines, a bar with loss and speed, the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from flowrun.engine.compile import Rehearsed
from flowrun.engine.cost.footprint import memory_of
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.module_path import unit_of
from flowrun.engine.ir.sbp import NdSbp, format_nd_sbp
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.trace.step_time import StepTime
from flowrun.launcher.job.job import Job
from flowrun.launcher.report.group_equal import alike, extent, one_of_each, spans
from flowrun.launcher.report.report import Report, StepRecord, numbers
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.console import plain_table, printable, say, wide_console
from flowrun.launcher.terminal.units import duration, ranks, seconds, size

_SHORTEST_S, _LONGEST_S = 10, 60  # between lines; from one to the other in the first ten minutes
_LISTED = 8  # steps of a list
_NEWEST = 0.1  # share of the newest step in the mean that is shown


class SmoothSpeed:
    """A mean of speeds and times in which the newest steps count most."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._inverse = 0.0  # seconds of a unit of work

    def add(self, record: StepRecord) -> float:
        """Add a step; return the units of work in a second."""
        inverse = 1 / record.speed if record.speed > 0 else self._inverse
        share = _NEWEST if self.step_s else 1.0
        self.step_s += share * (record.step_s - self.step_s)
        self._inverse += share * (inverse - self._inverse)
        return 1 / self._inverse if self._inverse else 0.0


class StepLines:
    """A line for a tenth of the run, and after 10 s to 60 s without one; the last step has one.

    steps: of the run.  every: steps from one line to the next, in place of that; 0: as said.
    unit: of speed, "tokens" or "samples".  clock: seconds since 1970.
    """

    def __init__(
        self, steps: int, every: int, unit: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.steps, self.every, self.unit = steps, every, unit
        self._clock, self._speed = clock, SmoothSpeed()
        self._began = self._last = clock()

    def line(self, record: StepRecord, rate: float) -> str | None:
        """Return the line of a step; None: it has none.  rate: of learning."""
        speed, now = self._speed.add(record), self._clock()
        if not self._is_due(record.step, now):
            return None
        self._last = now
        left = self.steps - 1 - record.step
        parts = (
            time.strftime("%H:%M:%S", time.localtime(now)),
            f"step {record.step}/{self.steps}",
            record.show("loss", record.loss, ".4f"),
            record.show("lr", rate, ".3g"),
            f"{speed:,.0f} {self.unit}/s",
            f"{duration(left * self._speed.step_s)} left" if left else "",
        )
        return "  ".join(filter(None, parts))

    def _is_due(self, step: int, now: float) -> bool:
        if step == self.steps - 1:
            return True
        if self.every:
            return step % self.every == 0
        pause = min(_LONGEST_S, max(_SHORTEST_S, (now - self._began) / 10))
        return step % max(1, self.steps // 10) == 0 or now - self._last >= pause


def list_steps(newest: Sequence[int], count: int) -> str:
    """Write the newest of `count` steps, and how many more there are."""
    listed = newest[-_LISTED:]
    more = f" and {count - len(listed)} before" if count > len(listed) else ""
    return f"{', '.join(map(str, listed))}{more}"


class Progress:
    """Prints to a console; where that is not a terminal, lines (StepLines) instead of a bar."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or wide_console()
        self.bar: Bar | None = None
        self.task = TaskID(0)
        self.steps = 0
        self.unit = ""
        self.lines: StepLines | None = None
        self.speed = SmoothSpeed()

    @property
    def console(self) -> Console:
        """The console for lines; the line that says what is being done makes room for them."""
        doing.clear()
        return self._console

    def show_plan(self, job: Job, training: Rehearsed) -> None:
        plan, rehearsal = training.plan, training.rehearsal
        self.steps = job.recipe.train.steps
        self.console.print(stage_table(job, training))
        self.unit = job.work.unit
        self.lines = StepLines(self.steps, job.recipe.train.log_every, self.unit)
        per_step = f"{job.recipe.train.batch_size} samples"
        if plan.micro_batches > 1:
            per_step += f" in {plan.micro_batches} micro-batches"
        self.console.print(
            f"a step: {per_step}, foreseen {seconds(rehearsal.step_s)}, "
            f"{size(rehearsal.sent_bytes)} between ranks"
        )
        for note in one_of_each(plan.notes, len(plan.placements)):
            say(self.console, f"note: {note}", "yellow")
        doing.doing(f"starting {ranks(sum(len(p.ranks) for p in plan.placements))}")

    def step(self, record: StepRecord, rate: float) -> None:
        """A step has ended.  rate: of learning."""
        if not self.console.is_terminal:
            if self.lines and (line := self.lines.line(record, rate)):
                self.console.print(line, highlight=False, soft_wrap=True)
            return
        speed, loss = self.speed.add(record), record.show("loss", record.loss, ".4f")
        if self.bar is None:
            self.bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[loss]}"),
                TextColumn(f"{{task.fields[speed]:,.0f}} {self.unit}/s"),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=4,  # ranks may need the core that draws
            )
            self.task = self.bar.add_task("", total=self.steps, loss=loss, speed=speed)
            self.bar.start()
        self.bar.update(self.task, completed=record.step + 1, loss=loss, speed=speed)

    def show_evaluation(self, step: int, validation: Results) -> None:
        """Show the results of an evaluation after a step; those of the last are in the report."""
        if step < self.steps - 1:
            found = ", ".join(f"{name} {value:.4f}" for name, value in numbers(validation).items())
            self.console.print(f"step {step}  validation {found}", highlight=False)

    def show_report(self, report: Report, folder: Path) -> None:
        """Show the end: loss, and what was foreseen next to what was measured."""
        self.close()
        parts = [f"loss {report.first_loss:.4f} -> {report.last_loss:.4f}"]
        parts += [
            f"validation {name} {value:.4f}" for name, value in numbers(report.validation).items()
        ]
        self.console.print(", ".join(parts), style="bold", highlight=False)
        if report.ended_by:
            done = report.first_step + report.steps
            text = f"{report.ended_by} ended the run after {done} of {self.steps} steps"
            self.console.print(text, highlight=False, markup=False)
        headings = ("", "foreseen", "measured")
        self.console.print(plain_table("", headings, compare_figures(report), right=headings[1:]))
        if report.best_step is not None:
            self.console.print(f"best checkpoint: step {report.best_step}", highlight=False)
        if report.step_times:
            self.console.print(step_time_table(report.step_times))
        if report.advice:
            say(self.console, f"note: {report.advice}", "yellow")
        self.console.print(f"everything of this run: {folder}", highlight=False, soft_wrap=True)
        say(self.console, "flowrun runs, eval, sample, export and resume take this folder", "dim")

    def show_sample(self, prompt: str, text: str) -> None:
        """Show the beginning of a text, and how the trained model goes on."""
        self.console.print("it now writes:", highlight=False)
        written = Text.assemble((printable(prompt), "dim"), printable(text))
        self.console.print(written, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def compare_figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield a name, what was foreseen, and what was measured."""
    foreseen, measured = sides = report.foreseen, report.measured
    yield "step time", seconds(foreseen["step_s"]), seconds(measured["step_s"])
    if "others" in measured:
        yield "cores that others have", "0%", f"{measured['others']:.0%}"
    if "utilisation" in measured:
        one, other = (f"{side['utilisation']:.1%}" for side in sides)
        yield "model FLOPs, of the peak", one, other
    yield "bytes sent, all ranks", size(foreseen["sent_bytes"]), size(measured["sent_bytes"])
    if any(measured["peak_bytes"].values()):
        one, other = (size(max(side["peak_bytes"].values())) for side in sides)
        yield "peak memory of a rank", one, other


def step_time_table(times: Sequence[StepTime]) -> Table:
    columns = {
        "step": "step_s",
        "compute": "compute_s",
        "packing": "handling_s",
        "bytes under way": "communication_s",
        "ranks not there": "ranks_s",
        "data": "data_s",
        "engine": "engine_s",
    }
    rows = []
    for spent_by in times:
        spent = (seconds(getattr(spent_by, name)) for name in columns.values())
        longest = next((f"{name} {seconds(s)}" for name, s in spent_by.reasons.items()), "")
        rows.append((str(spent_by.rank), *spent, longest))
    title = f"where a step went, mean of the last {times[0].steps}"
    headings = ("rank", *columns, "waited longest for")
    return plain_table(title, headings, rows, right=headings[:-1])


def stage_table(job: Job, training: Rehearsed) -> Table:
    """A line a stage, or a kind of stages: its ranks, modules, foreseen memory of a rank, and share
    of time that a rank computes.
    """
    plan, rehearsal = training.plan, training.rehearsal

    def kind(stage: int) -> tuple[object, ...]:
        held = memory_of(plan, stage)
        return plan.placements[stage].axes, held["parameter"], held["state"]

    rows = []
    for stages in alike(range(len(plan.placements)), kind):
        placement, more = plan.placements[stages[0]], len(stages) > 1
        row = (
            spans(stages),
            " x ".join(f"{name} {n}" for name, n in placement.axes) if more else str(placement),
            units(training, stages[0]) + (" …" if more else ""),
            extent((rehearsal.peak_bytes[k] for k in stages), size),
            extent((1 - rehearsal.bubble[k] for k in stages), "{:.0%}".format),
        )
        rows.append(row)
    title = f"{job.recipe.name}: {ranks(plan.num_ranks)}"
    right = ("stage", "memory of a rank", "busy")
    headings = ("stage", "placement", "modules", "memory of a rank", "busy")
    return plain_table(title, headings, rows, right=right)


def units(training: Rehearsed, stage: int) -> str:
    """List the blocks of the model that a stage computes.

    Blocks of which it has only copies of constants (split_stages.py), such as a mask, are left out.
    """
    ops = training.plan.graph.ops
    known = {op.name for op in ops}

    def is_copy(op: Op) -> bool:
        """An earlier stage has the same op."""
        base, at, _ = op.name.rpartition("@")
        return bool(at) and any(f"{base}@{earlier}" in known for earlier in range(stage))

    own = (
        unit_of(op.module)
        for op in ops
        if (op.stage, op.phase) == (stage, "forward")
        and op.module not in ("", "loss")
        and op.target.startswith("aten.")
        and not is_copy(op)
    )
    names = list(dict.fromkeys(own))
    return ", ".join(names) if len(names) <= 5 else f"{names[0]} … {names[-1]} ({len(names)})"


def layout(nd_sbp: NdSbp) -> str:
    """An nd-SBP for a person; no axes at all is a whole tensor."""
    return format_nd_sbp(nd_sbp) if nd_sbp else "whole"
