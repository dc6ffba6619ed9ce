"""A run, or two side by side: what differs in their recipes, and their figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowrun.launcher.commands.run_folders.run_summary import RunSummary, read_keys, summarize
from flowrun.launcher.recipe.key_trees import flatten_keys
from flowrun.launcher.report.metric_lines import Losses, read_losses
from flowrun.launcher.report.record import LOGS, METRICS
from flowrun.launcher.report.report import REPORT
from flowrun.launcher.terminal.units import seconds


def compare_runs(folders: Sequence[Path], console: Console) -> None:
    """Show a run, or two side by side: what differs in their recipes, and figures."""
    runs = [summarize(folder) for folder in folders]
    losses = [read_losses(folder / METRICS) for folder in folders]
    marks = ["●", "○"][: len(runs)]
    for mark, run in zip(marks, runs, strict=True):
        console.print(f"{mark} {run.folder}", soft_wrap=True)
        if (logs := run.folder / LOGS).is_dir():
            console.print(f"  what its ranks printed: {logs}/", soft_wrap=True, style="dim")
    if len(runs) > 1:
        console.print(_compare_recipes(folders))
    console.print(_compare_figures(runs, losses))


def _compare_recipes(folders: Sequence[Path]) -> Table | str:
    """Return a table of the keys whose values differ."""
    first, second = (dict(flatten_keys(read_keys(folder))) for folder in folders)
    keys = [k for k in {**first, **second} if first.get(k) != second.get(k)]
    if not keys:
        return "their recipes are the same"
    table = Table(box=None, pad_edge=False, title="recipe", title_justify="left")
    for heading in ("key", "●", "○"):
        table.add_column(heading, overflow="fold")
    for key in keys:
        table.add_row(key, *(str(each.get(key, "not there")) for each in (first, second)))
    return table


def _compare_figures(runs: Sequence[RunSummary], losses: Sequence[Losses]) -> Table:
    table = Table(box=None, pad_edge=False, title="figures", title_justify="left")
    table.add_column("")
    for _, mark in zip(runs, "●○", strict=False):
        table.add_column(mark, justify="right")
    rows: dict[str, list[str]] = {
        "status": [run.status for run in runs],
        "steps": [f"{run.done:,}" for run in runs],
        "first loss": [_show(each.training[:1]) for each in losses],
        "last loss": [_show(each.training[-1:]) for each in losses],
        "lowest loss": [_show_lowest(each.training) for each in losses],
        "last validation": [_show(each.validation[-1:]) for each in losses],
        "lowest validation": [_show_lowest(each.validation) for each in losses],
    }
    rows |= _rows_of_reports([_read_report(run.folder) for run in runs])
    for name, values in rows.items():
        if any(values):
            table.add_row(name, *values)
    return table


def _rows_of_reports(reports: Sequence[Mapping[str, object] | None]) -> dict[str, list[str]]:
    """Return rows of the reports of runs, of which some have none."""
    there = [found for found in reports if found]
    if not there:
        return {}
    figures: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "ranks": lambda found: str(found["ranks"]),
        "step time": lambda found: seconds(found["measured"]["step_s"]),
        f"{there[0]['unit']}/s": lambda found: f"{found['tokens_per_s']:,.0f}",
    }
    return {
        name: [show(found) if found else "" for found in reports] for name, show in figures.items()
    }


def _read_report(folder: Path) -> Mapping[str, object] | None:
    with suppress(OSError, ValueError):
        found: Mapping[str, Any] = json.loads((folder / REPORT).read_text())
        return found
    return None


def _show(points: Sequence[tuple[int, float]]) -> str:
    return show_loss(points[0][1]) if points else ""


def _show_lowest(points: Sequence[tuple[int, float]]) -> str:
    if not points:
        return ""
    step, loss = min(points, key=lambda point: point[1])
    return f"{loss:.4f} at {step:,}"


def show_loss(value: float | None) -> str:
    """Write a loss with 4 decimals; nothing for None."""
    return "" if value is None else f"{value:.4f}"
