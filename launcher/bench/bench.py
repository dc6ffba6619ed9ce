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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from flowrun.launcher.bench.plot_results import draw
from flowrun.launcher.bench.process import execute
from flowrun.launcher.bench.results import FinishedRun, ResultLine, key_of, lines, step_seconds
from flowrun.launcher.bench.runs import round_of
from flowrun.launcher.bench.show_results import table
from flowrun.launcher.bench.suite import Suite
from flowrun.launcher.bench.sweep import expand_sweep
from flowrun.launcher.recipe.compose import compose
from flowrun.launcher.report.report import strict
from flowrun.launcher.terminal.console import NO_PLOT
from flowrun.launcher.terminal.units import seconds

FILE, PLOT = "bench.json", "bench.svg"


def bench(
    suite: Suite, folder: Path, console: Console, config_dir: str | None = None
) -> tuple[ResultLine, ...]:
    """Run the suite, print its table to `console`, and fill `folder`.

    config_dir: the user's own groups.
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
            plotted = draw(suite, found, folder / PLOT)
            files = f"{FILE}, {PLOT}" if plotted else FILE
            console.print(f"the same in {folder}: {files}", highlight=False, soft_wrap=True)
            if not plotted:
                console.print(NO_PLOT)
    return found


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Both end what runs, and show what is done."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _rounds(
    suite: Suite, folder: Path, console: Console, config_dir: str | None, records: list[FinishedRun]
) -> None:
    """Run all rounds; a run that failed once is not tried again."""
    runs = list(round_of(suite))
    failed: set[object] = set()
    for number in range(suite.rounds):
        for place, run in enumerate(runs):
            if key_of(run) in failed:
                continue
            console.print(
                f"round {number + 1}/{suite.rounds}  run {place + 1}/{len(runs)}  {run} …",
                end=" ",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            begun = time.monotonic()
            where = folder / "runs" / f"{number}_{place:02}_{run.experiment}"
            sample = execute(run, where, suite.timeout_s, config_dir)
            records.append(FinishedRun(number, key_of(run), sample, time.monotonic() - begun))
            _write(suite, records, folder / FILE)
            if sample.problem:
                failed.add(key_of(run))
                console.print("failed", style="yellow")
                console.print(f"  {sample.problem}", style="yellow", markup=False, soft_wrap=True)
                continue
            later = sum(key_of(each) not in failed for each in runs[place + 1 :])
            later += (suite.rounds - 1 - number) * (len(runs) - len(failed))
            left = later * statistics.mean(record.wall_s for record in records)
            console.print(
                f"{seconds(statistics.median(step_seconds(suite, sample)))} a step; "
                f"{f'{left:.0f} s' if left < 90 else f'{left / 60:.0f} min'} left",
                highlight=False,
            )


def _write(suite: Suite, records: Sequence[FinishedRun], file: Path) -> None:
    """All that was measured, and what it comes to."""
    text = {
        "suite": asdict(suite),
        "machine": _machine(),
        "lines": [asdict(line) for line in lines(suite, records)],
        "records": [asdict(record) for record in records],
    }
    file.write_text(json.dumps(strict(text), indent=1) + "\n")


def _machine() -> dict[str, object]:
    """Describe the machine that measured."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
