"""A run, or two side by side: what differs in their recipes, their figures, their curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowrun.launcher.commands.run_folders.run_summary import RunSummary, read_keys, summarize
from flowrun.launcher.recipe.key_trees import flatten_keys
from flowrun.launcher.report.loss_curve import LossCurve, plot_text, read_curve
from flowrun.launcher.report.record import LOGS, METRICS
from flowrun.launcher.report.report import REPORT
from flowrun.launcher.terminal.units import seconds


def compare_runs(folders: Sequence[Path], console: Console) -> None:
    """Show a run, or two side by side: what differs in their recipes, figures, curves."""
    runs = [summarize(folder) for folder in folders]
    curves = [read_curve(folder / METRICS) for folder in folders]
    marks = ["●", "○"][: len(runs)]
    for mark, run in zip(marks, runs, strict=True):
        console.print(f"{mark} {run.folder}", soft_wrap=True)
        if (logs := run.folder / LOGS).is_dir():
            console.print(f"  what its ranks printed: {logs}/", soft_wrap=True, style="dim")
    if len(runs) > 1:
        console.print(_compare_recipes(folders))
    console.print(_compare_figures(runs, curves))
    points = [curve.training for curve in curves]
    if all(points):
        for line in plot_text(points, min(console.width, 100)):
            console.print(line, markup=False)


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


def _compare_figures(runs: Sequence[RunSummary], curves: Sequence[LossCurve]) -> Table:
    table = Table(box=None, pad_edge=False, title="figures", title_justify="left")
    table.add_column("")
    for _, mark in zip(runs, "●○", strict=False):
        table.add_column(mark, justify="right")
    rows: dict[str, list[str]] = {
        "status": [run.status for run in runs],
        "steps": [f"{run.done:,}" for run in runs],
        "first loss": [_point(curve.training[:1]) for curve in curves],
        "last loss": [_point(curve.training[-1:]) for curve in curves],
        "lowest loss": [_best(curve.best) for curve in curves],
        "last validation": [_point(curve.validation[-1:]) for curve in curves],
        "lowest validation": [_best(curve.best_validation) for curve in curves],
    }
    reports = [_read_report(run.folder) for run in runs]
    if any(reports):
        unit = next(found["unit"] for found in reports if found)
        rows["ranks"] = [str(found["ranks"]) if found else "" for found in reports]
        rows["step time"] = [
            seconds(found["measured"]["step_s"]) if found else "" for found in reports
        ]
        rows[f"{unit}/s"] = [f"{found['tokens_per_s']:,.0f}" if found else "" for found in reports]
    for name, values in rows.items():
        if any(values):
            table.add_row(name, *values)
    return table


def _read_report(folder: Path) -> Mapping[str, Any] | None:
    with suppress(OSError, ValueError):
        found: Mapping[str, Any] = json.loads((folder / REPORT).read_text())
        return found
    return None


def _point(points: Sequence[tuple[float, float]]) -> str:
    return show_loss(points[0][1]) if points else ""


def _best(point: tuple[float, float] | None) -> str:
    return f"{point[1]:.4f} at {point[0]:,.0f}" if point else ""


def show_loss(value: float | None) -> str:
    """Write a loss with 4 decimals; nothing for None."""
    return "" if value is None else f"{value:.4f}"
