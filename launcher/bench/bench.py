"""The story of a bench: rounds of runs, one after the other; then lines, a table, files.

After every run `bench.json` holds all that was measured, so that Ctrl-C loses nothing.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from flowrun.launcher.bench.process import execute
from flowrun.launcher.bench.results import FinishedRun, ResultLine, lines, step_seconds
from flowrun.launcher.bench.show_results import draw, table
from flowrun.launcher.bench.suite import Suite, round_of
from flowrun.launcher.bench.sweep import expand_sweep
from flowrun.launcher.recipe.compose import compose
from flowrun.launcher.terminal.as_json import strict
from flowrun.launcher.terminal.console import NO_PLOT
from flowrun.launcher.terminal.units import duration, seconds

FILE, PLOT = "bench.json", "bench.svg"


def bench(
    suite: Suite, folder: Path, console: Console, config_dir: str | None = None
) -> tuple[ResultLine, ...]:
    """Run the suite, print its table to `console`, and fill `folder`.

    Raises RecipeError if a recipe cannot be composed (nothing was started), KeyboardInterrupt after
    the table of what is done.
    """
    for name in suite.rows:
        compose(suite.recipe_of(suite.experiments[name]), config_dir)
    if suite.sweep:
        console.print("choosing placements …", style="dim")
        suite = expand_sweep(suite, config_dir)
    folder.mkdir(parents=True, exist_ok=True)
    records: list[FinishedRun] = []
    try:
        with _sigterm_as_ctrl_c():
            _rounds(suite, folder, console, config_dir, records)
    finally:
        found = lines(suite, records)
        if records:
            console.print()
            console.print(table(suite, found))
            show_files(console, folder, draw(suite, found, folder / PLOT))
    return found


def show_files(console: Console, folder: Path, plotted: bool) -> None:
    """Say where the results are.  plotted: with their plot."""
    files = f"{FILE}, {PLOT}" if plotted else FILE
    console.print(f"the same in {folder}: {files}", highlight=False, soft_wrap=True)
    if not plotted:
        console.print(NO_PLOT)


def write_results(folder: Path, results: Mapping[str, object]) -> None:
    """Write the file of all results, of any kind of suite."""
    (folder / FILE).write_text(json.dumps(strict(results), indent=1) + "\n")


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Both end what runs, and show what is done."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _rounds(
    suite: Suite, folder: Path, console: Console, config_dir: str | None, records: list[FinishedRun]
) -> None:
    """Run all rounds; a run that failed once is not tried again."""
    runs = dict(enumerate(round_of(suite)))
    number_of_runs = len(runs)
    for number in range(suite.rounds):
        for place, run in list(runs.items()):
            where = f"round {number + 1}/{suite.rounds}  run {place + 1}/{number_of_runs}  {run} …"
            console.print(where, end=" ", highlight=False, markup=False, soft_wrap=True)
            begun = time.monotonic()
            own = folder / "runs" / f"{number}_{place:02}_{run.experiment}"
            sample = execute(run, own, suite.timeout_s, config_dir)
            records.append(FinishedRun(number, run.key, sample, time.monotonic() - begun))
            _write(suite, records, folder)
            if sample.problem:
                del runs[place]
                console.print("failed", style="yellow")
                console.print(f"  {sample.problem}", style="yellow", markup=False, soft_wrap=True)
                continue
            later = sum(k > place for k in runs) + (suite.rounds - 1 - number) * len(runs)
            left = later * statistics.mean(record.wall_s for record in records)
            step_s = statistics.median(step_seconds(suite, sample))
            console.print(f"{seconds(step_s)} a step; {duration(left)} left", highlight=False)


def _write(suite: Suite, records: list[FinishedRun], folder: Path) -> None:
    machine = {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    results = {
        "suite": asdict(suite),
        "machine": machine,
        "lines": [asdict(line) for line in lines(suite, records)],
        "records": [asdict(record) for record in records],
    }
    write_results(folder, results)
