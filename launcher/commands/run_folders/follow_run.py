"""The steps of a run, printed as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from flowrun.launcher.commands.run_folders.run_summary import RUNNING, find_status, read_keys
from flowrun.launcher.report.metric_lines import MetricLine, parse_metric_line
from flowrun.launcher.report.record import METRICS

_SHOWN = 1000  # bytes of what is there that the first look shows
_LOOK_S = 1.0


def follow_run(
    folder: Path, console: Console, sleep: Callable[[float], object] = time.sleep
) -> str:
    """Print the steps of a run as they come, one line a look; return its status when it has ended.

    sleep: waits between two looks.
    """
    keys, metrics = read_keys(folder), folder / METRICS
    at = max(0, metrics.stat().st_size - _SHOWN) if metrics.exists() else 0
    while True:
        status = find_status(folder, keys)
        text, at = _read_lines(metrics, at)
        lines = [*filter(None, map(parse_metric_line, text.splitlines()))]
        for line in lines:
            if line.validation is None and line is not lines[-1]:
                continue  # of the steps between two looks the last is enough
            console.print(_describe_line(line), highlight=False, markup=False)
        if status != RUNNING:
            console.print(f"{folder}: {status}", highlight=False, markup=False, soft_wrap=True)
            return status
        sleep(_LOOK_S)


def _read_lines(file: Path, at: int) -> tuple[str, int]:
    """Return the whole lines of a file from a byte on, and the byte after them."""
    if not file.exists():
        return "", 0
    with file.open("rb") as stream:
        stream.seek(min(at, file.stat().st_size))  # it is shorter where ranks went back
        begun = stream.tell()
        whole, newline, _ = stream.read().rpartition(b"\n")
        return whole.decode("utf-8", "replace"), begun + len(whole) + len(newline)


def _describe_line(line: MetricLine) -> str:
    if line.validation is not None:
        found = line.validation.items()
        values = ", ".join(f"{name} {value:.4f}" for name, value in found if value is not None)
        return f"step {line.step}  validation {values}"
    loss = "not finite" if line.loss is None else f"{line.loss:.4f}"
    return f"step {line.step}  loss {loss}  {line.tokens_per_s:,.0f}/s"
