"""flowrun top: the figures of a run and their curves, live, from the run's folder alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from flowrun.engine.ir.files import DAMAGED
from flowrun.launcher.commands.run_folders import run_summary
from flowrun.launcher.commands.run_folders.list_runs import default_folders
from flowrun.launcher.commands.run_folders.run_summary import RunSummary
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.report.metric_lines import numbers_of, read_lines
from flowrun.launcher.store.run_files import METRICS
from flowrun.launcher.terminal.console import plain_table
from flowrun.launcher.terminal.units import duration, seconds, size

_LOOK_S = 1.0
_MOST_POINTS = 256  # of a curve; each is a mean, of twice as many steps whenever there are more
_MOST_BARS = 60
_BARS = "▁▂▃▄▅▆▇█"
_NOISE = 1e-9  # of a mean of equal values, relative
# tag -> how its values are written; others have 4 digits
_UNITS: Mapping[str, Callable[[float], str]] = {
    "tokens_per_s": lambda x: f"{x:,.0f}",
    "step_s": seconds,
    "waited_s": seconds,
    "memory_bytes": size,
    "skipped_updates": lambda x: f"{x:.0f}",
}


@dataclass
class Curve:
    """The values of a tag, in the same memory for any number of steps.

    points: means of `width` values each; the rest is summed.  last, lowest: of all values.
    """

    points: list[float] = field(default_factory=list)
    width: int = 1
    last: float = math.nan
    lowest: float = math.inf
    _sum: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Add the value of the next step; one that is not finite leaves the curve as it is."""
        self.last = value
        if not math.isfinite(value):
            return
        self.lowest = min(self.lowest, value)
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self.width:
            self.points.append(self._sum / self.width)
            self._sum, self._count = 0.0, 0
        if len(self.points) == _MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points, self.width = [(a + b) / 2 for a, b in pairs], 2 * self.width

    def draw(self, bars: int) -> str:
        """Return the curve as a row of at most `bars` bars, from its lowest to its highest."""
        if not self.points:
            return ""
        count = min(bars, len(self.points))
        ends = [len(self.points) * k // count for k in range(count + 1)]
        means = [sum(self.points[a:b]) / (b - a) for a, b in pairwise(ends)]
        low, high = min(means), max(means)
        scale = (len(_BARS) - 1) / (high - low) if high - low > _NOISE * abs(high) else 0.0
        return "".join(_BARS[round((mean - low) * scale)] for mean in means)


class RunReader:
    """The reader takes what a run has written since it looked before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.curves: dict[str, Curve] = {}
        self._at, self._file = 0, 0  # bytes that are read, and of which file

    def read(self) -> None:
        """Read more lines of metrics.jsonl; all where ranks went back, which replaces it."""
        metrics = self.folder / METRICS
        with suppress(OSError):
            about = metrics.stat()
            if about.st_ino != self._file or about.st_size < self._at:
                self.curves, self._at, self._file = {}, 0, about.st_ino
            lines, self._at = read_lines(metrics, self._at)
            for line in lines:
                with suppress(*DAMAGED):
                    for tag, value in numbers_of(json.loads(line)):
                        curve = self.curves.setdefault(tag, Curve())
                        curve.add(math.nan if value is None else value)


def choose_run(folder: Path | None) -> Path:
    """Return the folder of a run; None: the newest that lies where runs do.  Raises RecipeError."""
    if folder is None:
        found = run_summary.find_runs(default_folders())
        if not found:
            instead = "Name the folder of a run: flowrun top RUN_DIR."
            raise CommandLineError("top", "there is no run here.", instead)
        folder = found[-1]
    run_summary.summarize(folder)
    return folder


def show_top(folder: Path, console: Console, sleep: Callable[[float], object] = time.sleep) -> None:
    """Show a run until it ends or Ctrl-C; off a terminal, once."""
    reader = RunReader(folder)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            reader.read()
            summary = run_summary.summarize(folder)
            live.update(frame(summary, reader, console.width), refresh=True)
            if summary.status != run_summary.RUNNING or not console.is_terminal:
                return
            sleep(_LOOK_S)


def frame(summary: RunSummary, reader: RunReader, width: int) -> RenderableType:
    """Return what is shown of a run at one moment, in `width` columns."""
    bars = max(8, min(_MOST_BARS, width - 46))
    rows = []
    for tag, curve in reader.curves.items():
        write = _UNITS.get(tag, lambda x: f"{x:.4g}")
        now = "not finite" if math.isnan(curve.last) else write(curve.last)
        lowest = write(curve.lowest) if curve.lowest < math.inf else ""
        rows.append((tag.replace("_", " "), now, lowest, curve.draw(bars)))
    names = ("", "now", "lowest", "from the first step to the last")
    table = plain_table("", names, rows, right=names[1:3], whole=names)
    title = Text(f"{summary.name}  {reader.folder}", style="bold", no_wrap=True)
    return Group(title, Text(_progress_of(summary, reader)), "", table)


def _progress_of(summary: RunSummary, reader: RunReader) -> str:
    """Say how far a run is, how often it started again, and what is left."""
    done, asked = summary.done, summary.asked
    steps = f"step {done:,} of {asked:,} ({done / asked:.0%})" if asked else f"{done:,} steps"
    parts = [summary.status, steps]
    if count := run_summary.count_restarts(reader.folder):
        parts.append(f"started again {count} x")
    step = reader.curves.get("step_s")
    if summary.status == run_summary.RUNNING:
        parts.append(f"last line {duration(summary.age_s)} ago")
        if step and step.points and asked:
            parts.append(f"{duration((asked - done) * step.points[-1])} left")
    return "  ".join(parts)
