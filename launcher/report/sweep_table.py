"""Compare the jobs of `flowrun -m` at its end: a table, `comparison.csv` and `comparison.png` in
the sweep's folder.

Hydra calls `Comparison` (conf/config.yaml, hydra.callbacks) after each job and after the last.  A
combination that makes no sense is skipped with its reason; the others run.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flowrun.engine.errors import FlowrunError, RunError
from flowrun.launcher.recipe.schema import VALIDATION
from flowrun.launcher.report.bars import BarPanel, draw_bars
from flowrun.launcher.terminal.console import NO_PLOT, plain_table, wide_console
from flowrun.launcher.terminal.units import seconds, size

TABLE, PLOT = "comparison.csv", "comparison.png"
RAN, SKIPPED, FAILED, SUBMITTED = "ran", "skipped", "failed", "submitted"

# A job's numbers by their names in the CSV -> the heading in the table, and how it is shown there.
# tokens/s: samples, where they are no sequences of tokens.  peak: memory of the rank that needs
# most.  sent: by all ranks in a step.
COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "ranks": ("ranks", "{:.0f}".format),
    "loss": ("loss", "{:.4f}".format),
    "validation_loss": ("valid.", "{:.4f}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "step_s": ("step", seconds),
    "foreseen_step_s": ("foreseen", seconds),
    "peak_bytes": ("peak", size),
    "foreseen_peak_bytes": ("foreseen", size),
    "sent_bytes": ("sent", size),
}
NUMBERS = (*COLUMNS, "foreseen_sent_bytes")
WIDE, _NARROW = 110, 5  # columns of a terminal that has room for all; how many others show
_VALIDATION = "validation_"  # before the name of a result of an evaluation
_HIGHEST = ("tokens_per_s", "accuracy", "hit_rate", "auc", "f1")  # part of a name: best if high
Column = tuple[str, tuple[str, Callable[[float], str]]]  # a row of COLUMNS


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job of the sweep: what was set on its command line, and its Report or the error that
    refused or ended it.
    """

    overrides: tuple[str, ...]
    outcome: Any

    @property
    def status(self) -> str:
        """ran, skipped (the recipe refuses the combination), failed (while it ran), or submitted
        (to a queue).
        """
        if not isinstance(self.outcome, Exception):
            return SUBMITTED if hasattr(self.outcome, "job") else RAN
        expected = isinstance(self.outcome, FlowrunError)
        return SKIPPED if expected and not isinstance(self.outcome, RunError) else FAILED

    @property
    def reason(self) -> str:
        """Why it did not run to its end, in a line; "" if it did."""
        error = self.outcome
        if isinstance(error, FlowrunError):
            return f"{error.where}: {error.problem.splitlines()[0]}"
        if isinstance(error, Exception):
            return f"{type(error).__name__}: {error}"
        return str(self.outcome) if self.status == SUBMITTED else ""

    def wait(self) -> JobRow:
        """Wait until a job in the queue that is waited for has ended; return its row."""
        if self.status != SUBMITTED or not self.outcome.waits:
            return self
        return JobRow(self.overrides, self.outcome.outcome())

    @property
    def numbers(self) -> dict[str, float]:
        """NUMBERS that the job has, seconds and bytes, and the other results of its last evaluation
        as validation_NAME; peak_bytes are of the rank that needs most, sent_bytes of all ranks in a
        step.
        """
        if self.status != RAN:
            return {}
        report = self.outcome
        values = {
            "ranks": report.ranks,
            "loss": report.last_loss,
            "tokens_per_s": report.tokens_per_s,
            **{f"{_VALIDATION}{name}": value for name, value in report.validation.items()},
        }
        for prefix, side in (("", report.measured), ("foreseen_", report.foreseen)):
            values[f"{prefix}step_s"] = side["step_s"]
            values[f"{prefix}peak_bytes"] = max(side["peak_bytes"].values(), default=0) or None
            values[f"{prefix}sent_bytes"] = side["sent_bytes"]
        return {name: value for name, value in values.items() if value is not None}


def find_best(rows: Sequence[Mapping[str, object]], config: object) -> tuple[int, str, bool]:
    """Return the best row (-1: none has the number), the number that it is best by, and whether the
    highest is: by sweep.objective and hydra.sweeper.direction of a config, or by a loss.
    """
    config = config if isinstance(config, DictConfig) else OmegaConf.create()
    asked = str(OmegaConf.select(config, "sweep.objective") or "").replace(VALIDATION, _VALIDATION)
    scores: dict[str, dict[int, float]] = {}
    for name in (asked, "validation_loss", "loss"):
        values = enumerate(row.get(name) for row in rows)
        scores[name] = {k: v for k, v in values if isinstance(v, float) and math.isfinite(v)}
    objective = next((name for name in scores if scores[name]), "loss")
    direction = OmegaConf.select(config, "hydra.sweeper.direction")  # text, or Optuna's enum
    guessed = any(name in objective for name in _HIGHEST)
    highest = str(direction).endswith("maximize") if direction else guessed
    order = sorted(scores[objective], key=scores[objective].__getitem__, reverse=highest)
    return next(iter(order), -1), objective, highest


class JobObjective(float):
    """The number that a job returns to Hydra's sweeper.  outcome: the report of the job."""

    outcome: Any

    @staticmethod
    def of(name: str, outcome: Any) -> object:
        """Return the objective `name` (sweep.objective) of an outcome; the outcome itself where
        none is asked for or it is no report: a sweeper counts that job as failed.
        """
        if not name or not hasattr(outcome, "last_loss"):
            return outcome
        found = JobObjective(JobRow((), outcome).numbers[name.replace(VALIDATION, _VALIDATION)])
        found.outcome = outcome
        return found


class Comparison(Callback):
    """Collects the jobs of a multirun; the CSV grows with each, so that Ctrl-C loses nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or wide_console()
        self.rows: list[JobRow] = []

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Say which job begins; a single run has nothing to say."""
        if _is_sweep(config):
            words = " ".join(readable(config.hydra.overrides.task))
            self.console.rule(f"job {len(self.rows)}  {escape(words)}", align="left", style="dim")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Keep the outcome; the work of a job never raises a FlowrunError (cli.py returns it)."""
        outcome = job_return._return_value
        outcome = outcome.outcome if isinstance(outcome, JobObjective) else outcome
        self.rows.append(JobRow(readable(job_return.overrides or ()), outcome))
        if _is_sweep(config):
            if self.rows[-1].status == SKIPPED:
                self.console.print(f"[yellow]skipped[/]: {escape(self.rows[-1].reason)}")
            write_csv(self.rows, Path(config.hydra.sweep.dir) / TABLE)

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """The table, and where to find it again."""
        self.rows = [row.wait() for row in self.rows]
        write_csv(self.rows, Path(config.hydra.sweep.dir) / TABLE)
        self.console.print(comparison(self.rows, self.console.width, config))
        folder = Path(config.hydra.sweep.dir)
        plotted = draw(self.rows, folder / PLOT)
        files = f"{TABLE}, {PLOT}" if plotted else TABLE
        self.console.print(f"the same in {folder}: {files}", highlight=False, soft_wrap=True)
        if not plotted and any(row.numbers for row in self.rows):
            self.console.print(NO_PLOT)


def comparison(rows: Sequence[JobRow], width: int = WIDE, config: object = None) -> Table:
    """A line a job: what differs between the jobs, then numbers, or the reason why not; below them
    which is best, of which `config` may say what that is.

    width: of the output; where it is narrow the last numbers are left out, and not what differs.
    """
    results = [row.numbers for row in rows]
    shown = _columns(results)[: len(COLUMNS) if width >= WIDE else _NARROW]
    lines: list[list[str | Text]] = []
    for number, (row, label) in enumerate(zip(rows, labels(rows), strict=True)):
        about = Text(label)
        if row.status != RAN:
            colour = {SKIPPED: "yellow", FAILED: "red"}.get(row.status, "dim")
            about.append(f"\n{row.status}: {row.reason}", colour)
        cells = (show(results[number][k]) if k in results[number] else "" for k, (_, show) in shown)
        lines.append([str(number), about, *cells])
    numbers = ["job", *(heading for _, (heading, _) in shown)]
    headings = ("job", "recipe and changes", *numbers[1:])
    table = plain_table("jobs", headings, lines, right=numbers, whole=numbers)
    table.columns[1].min_width = 24
    best, objective, _ = find_best(results, config)
    if best >= 0 and len(rows) > 1:
        table.rows[best].style = table.caption_style = "bold"
        table.caption, table.caption_justify = f"best {objective}: job {best}", "left"
    return table


def _columns(results: Sequence[Mapping[str, float]]) -> list[Column]:
    """Return COLUMNS, with metrics of evaluations behind the losses."""
    names = dict.fromkeys(k for each in results for k in each if isinstance(each[k], float))
    metrics = (k for k in names if k not in NUMBERS)
    added = [(k, (k.removeprefix(_VALIDATION), "{:.4f}".format)) for k in metrics]
    return [*[*COLUMNS.items()][:3], *added, *[*COLUMNS.items()][3:]]


def labels(rows: Sequence[JobRow]) -> list[str]:
    """Return for each job what was set for it and not for all of them."""
    shared = set.intersection(*(set(row.overrides) for row in rows)) if len(rows) > 1 else set()
    return [
        " ".join(text.removeprefix("recipe=") for text in row.overrides if text not in shared)
        for row in rows
    ]


def write_csv(rows: Sequence[JobRow], file: Path) -> None:
    """A line a job: a column for each key that was set, then status, reason, NUMBERS and the other
    results of evaluations.
    """
    results = [row.numbers for row in rows]
    named = dict.fromkeys([*NUMBERS, *(name for found in results for name in found)])
    keys = list(dict.fromkeys(text.partition("=")[0] for row in rows for text in row.overrides))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["job", *keys, "status", "reason", *named])
        writer.writeheader()
        for number, row in enumerate(rows):
            given = {key: value for key, _, value in (t.partition("=") for t in row.overrides)}
            about = {"job": number, "status": row.status, "reason": row.reason}
            writer.writerow({**given, **about, **results[number]})


def draw(rows: Sequence[JobRow], file: Path) -> bool:
    """Draw bars of the jobs that ran: loss, speed, step time and memory, foreseen and measured.

    Return False if nothing ran, or if matplotlib (extra `plot`) is not installed.
    """
    ran = {k: row.numbers for k, row in enumerate(rows) if row.numbers}
    panels = []
    for title, unit, sides in (
        ("loss", 1.0, {"loss": "training", "validation_loss": "validation"}),
        ("step time (ms)", 1e3, {"step_s": "measured", "foreseen_step_s": "foreseen"}),
        ("tokens/s, or samples/s", 1.0, {"tokens_per_s": "measured"}),
        ("memory (MB)", 1e-6, {"peak_bytes": "measured", "foreseen_peak_bytes": "foreseen"}),
    ):
        bars = [
            (side, colour, [numbers.get(key, 0) * unit for numbers in ran.values()])
            for (key, side), colour in zip(sides.items(), ("#3b6ea5", "#d9a441"), strict=False)
            if any(key in numbers for numbers in ran.values())
        ]
        panels.append(BarPanel(title, bars))
    named = labels(rows)
    return draw_bars(file, [named[k] for k in ran], panels)


def readable(overrides: Iterable[object]) -> tuple[str, ...]:
    """Overrides without Hydra's `+`."""
    return tuple(str(text).lstrip("+") for text in overrides)


def _is_sweep(config: DictConfig) -> bool:
    return config.hydra.mode is not None and config.hydra.mode.name == "MULTIRUN"
