"""A run, or two side by side: what differs in their recipes, and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from flowrun.launcher.commands.run_folders.run_summary import read_keys, summarize
from flowrun.launcher.recipe.key_trees import flatten_keys
from flowrun.launcher.report.metric_lines import read_losses
from flowrun.launcher.report.record import LOGS, METRICS
from flowrun.launcher.report.report import REPORT
from flowrun.launcher.terminal.units import seconds


def compare_runs(folders: Sequence[Path], console: Console) -> None:
    """Show a run, or two side by side."""
    for mark, folder in zip("●○", folders, strict=False):
        console.print(f"{mark} {folder}", soft_wrap=True)
        if (logs := folder / LOGS).is_dir():
            console.print(f"  what its ranks printed: {logs}/", soft_wrap=True, style="dim")
    if len(folders) > 1:
        first, second = (dict(flatten_keys(read_keys(folder))) for folder in folders)
        pairs = {
            key: [str(each.get(key, "not there")) for each in (first, second)]
            for key in {**first, **second}
            if first.get(key) != second.get(key)
        }
        same = "their recipes are the same"
        console.print(_make_table("recipe", pairs, "left") if pairs else same)
    figures = [_figures_of(folder) for folder in folders]
    rows = {name: [each.get(name, "") for each in figures] for each in figures for name in each}
    console.print(_make_table("figures", rows, "right"))


def _make_table(
    title: str, rows: Mapping[str, Sequence[str]], justify: Literal["left", "right"]
) -> Table:
    """Make a table with a column for each run."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for mark, _ in zip("●○", next(iter(rows.values())), strict=False):
        table.add_column(mark, justify=justify, overflow="fold")
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def _figures_of(folder: Path) -> dict[str, str]:
    """Return what there is to say of a run, by name."""
    run, losses = summarize(folder), read_losses(folder / METRICS)
    figures = {"status": run.status, "steps": f"{run.done:,}"}
    if losses.training:
        figures["first loss"] = show_loss(losses.training[0][1])
    for name, points in (("loss", losses.training), ("validation", losses.validation)):
        if points:
            step, lowest = min(points, key=lambda point: point[1])
            figures[f"last {name}"] = show_loss(points[-1][1])
            figures[f"lowest {name}"] = f"{lowest:.4f} at {step:,}"
    with suppress(OSError, ValueError, KeyError):  # a run that has not ended has no report
        report = json.loads((folder / REPORT).read_text())
        figures["ranks"] = str(report["ranks"])
        figures["step time"] = seconds(report["measured"]["step_s"])
        figures[f"{report['unit']}/s"] = f"{report['tokens_per_s']:,.0f}"
    return figures


def show_loss(value: float | None) -> str:
    """Write a loss with 4 decimals; nothing for None."""
    return "" if value is None else f"{value:.4f}"
