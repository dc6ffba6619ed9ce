"""What `flowrun -m` ends with: one table that compares the jobs.

Hydra calls `Comparison` (conf/config.yaml, hydra.callbacks) after each job and after the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.console import wide_console

# valid.: validation loss.  sent: by all ranks in a step.  peak: memory of the rank that needs most.
COLUMNS = ("ranks", "loss", "valid.", "step", "tokens/s", "sent", "peak")


@dataclass(frozen=True, slots=True)
class Row:
    """One job: what was set on its command line, and its Report or the error that refused or ended
    it.
    """

    overrides: tuple[str, ...]
    outcome: Any


class Comparison(Callback):
    """Collects the jobs of a multirun and prints their table."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or wide_console()
        self.rows: list[Row] = []

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Say which job begins; a single run has nothing to say."""
        if config.hydra.mode is not None and config.hydra.mode.name == "MULTIRUN":
            words = " ".join(readable(config.hydra.overrides.task))
            self.console.rule(f"job {len(self.rows)}  {words}", align="left", style="dim")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Keep the outcome; the work of a job itself never raises a FlowrunError (cli.py returns
        it).
        """
        outcome = job_return._return_value
        self.rows.append(Row(readable(job_return.overrides or ()), outcome))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """The table."""
        self.console.print(comparison(self.rows))


def comparison(rows: list[Row]) -> Table:
    """A line a job: what differs between the jobs, then numbers, or the reason why not."""
    table = Table(title="jobs", title_justify="left", box=None, pad_edge=False)
    shared = set.intersection(*(set(row.overrides) for row in rows)) if len(rows) > 1 else set()
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("recipe and changes", overflow="fold", min_width=24)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        differs = " ".join(
            text.removeprefix("recipe=") for text in row.overrides if text not in shared
        )
        if isinstance(row.outcome, Exception):
            table.add_row(str(number), f"{differs}\n[red]{escape(_reason(row.outcome))}[/]")
        else:
            table.add_row(str(number), differs, *_numbers(row.outcome))
    return table


def _numbers(report: Any) -> list[str]:
    from flowrun.launcher.progress import seconds, size

    validation = report.validation.get("loss")
    peaks = report.measured["peak_bytes"].values()
    return [
        str(report.ranks),
        f"{report.last_loss:.4f}",
        "" if validation is None else f"{validation:.4f}",
        seconds(report.measured["step_s"]),
        f"{report.tokens_per_s:,.0f}",
        size(report.measured["sent_bytes"]),
        size(max(peaks)) if any(peaks) else "",
    ]


def _reason(error: Exception) -> str:
    if isinstance(error, FlowrunError):
        return f"{error.where}: {error.problem.splitlines()[0]}"
    return f"{type(error).__name__}: {error}"


def readable(overrides: Any) -> tuple[str, ...]:
    """Overrides without Hydra's `+`."""
    return tuple(str(text).lstrip("+") for text in overrides)
