"""The runs of some folders, in a line each; some runs with their figures; the steps of one as they
come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrun.engine.ir.files import DAMAGED
from flowrun.launcher.commands.run_folders import run_summary
from flowrun.launcher.recipe.key_schema import flatten_keys
from flowrun.launcher.report.metric_lines import (
    MetricLine,
    parse_metric_line,
    read_lines,
    read_losses,
)
from flowrun.launcher.store.run_files import LOGS, METRICS, RECIPE, REPORT
from flowrun.launcher.terminal.console import plain_table
from flowrun.launcher.terminal.units import duration, seconds

FOLDERS = ("outputs", "multirun", "runs")
_SHOWN = 1000  # bytes of what is there that the first look of --follow shows
_LOOK_S = 1.0
_LEFT_OUT = ("first ", "lowest ", "ranks")  # of the figures where more than two runs are shown
_WIDE = 100  # columns from which a list has the recipe, too


def show_runs(folders: Sequence[Path], followed: Path | None, console: Console) -> None:
    """Do what the command is asked.  Raises RecipeError.

    folders: a folder of runs, or some runs.  followed: a run to follow.
    """
    if followed:
        follow_run(followed, console)
    elif folders and all((folder / RECIPE).exists() for folder in folders):
        compare_runs(folders, console)
    elif len(folders) > 1 or any(not folder.is_dir() for folder in folders):
        wrong = next(folder for folder in folders if not (folder / RECIPE).exists())
        run_summary.read_keys(wrong)
    else:
        list_runs(folders or default_folders(), console)


def default_folders() -> list[Path]:
    """Return the folders where runs lie if none is named."""
    return [Path(name) for name in FOLDERS if Path(name).is_dir()]


def list_runs(folders: Sequence[Path], console: Console) -> None:
    """Print a line for each run, the newest last."""
    runs = run_summary.summarize_all(folders).runs
    wide = ["recipe"] if console.width >= _WIDE else []  # it is part of the folder's name
    numbers = ("steps", "loss", "valid.", "age")
    headings = ("run", *wide, *numbers, "status")
    rows = [
        (
            str(run.folder),
            *([run.name] if wide else []),
            f"{run.done:,}/{run.asked:,}" if run.asked else f"{run.done:,}",
            show_loss(run.loss),
            show_loss(run.validation),
            duration(run.age_s),
            run.status,
        )
        for run in runs
    ]
    table = plain_table("", headings, rows, right=numbers, whole=headings[1:])
    table.columns[0].min_width = 18
    for row, run in zip(table.rows, runs, strict=True):
        row.style = None if run.status in ("complete", run_summary.RUNNING) else "yellow"
    if not table.row_count:
        where = ", ".join(map(str, folders)) or " or ".join(FOLDERS)
        console.print(f"there is no run in {where}: flowrun recipe=mlp_hybrid makes one")
        return
    console.print(table)
    console.print(
        "flowrun runs A B compares, flowrun runs --follow A shows the steps of one", style="dim"
    )


def follow_run(
    folder: Path, console: Console, sleep: Callable[[float], object] = time.sleep
) -> str:
    """Print the steps of a run as they come, one line a look; return its status when it has ended.

    sleep: waits between two looks.
    """
    run_summary.read_keys(folder)  # raises if it is of another kind
    at = -_SHOWN
    while True:
        status = run_summary.find_status(folder)
        new, at = read_lines(folder / METRICS, at)  # it is shorter where ranks went back
        lines = [*filter(None, map(parse_metric_line, new))]
        for line in lines:
            if line.validation is None and line is not lines[-1]:
                continue  # of the steps between two looks the last is enough
            console.print(_describe_line(line), highlight=False, markup=False)
        if status != run_summary.RUNNING:
            console.print(f"{folder}: {status}", highlight=False, markup=False, soft_wrap=True)
            return status
        sleep(_LOOK_S)


def _describe_line(line: MetricLine) -> str:
    if line.validation is not None:
        found = line.validation.items()
        values = ", ".join(f"{name} {value:.4f}" for name, value in found if value is not None)
        return f"step {line.step}  validation {values}"
    loss = "not finite" if line.loss is None else f"{line.loss:.4f}"
    return f"step {line.step}  loss {loss}  {line.tokens_per_s:,.0f}/s"


def compare_runs(folders: Sequence[Path], console: Console) -> None:
    """Show a run, two side by side, or a line for each of more; the best is marked."""
    marks = [str(k) for k, _ in enumerate(folders, 1)]
    for mark, folder in zip(marks, folders, strict=True):
        console.print(f"{mark} {folder}", soft_wrap=True)
        if (logs := folder / LOGS).is_dir():
            console.print(f"  what its ranks printed: {logs}/", soft_wrap=True, style="dim")
    figures = _by_name([_figures_of(folder) for folder in folders], "")
    if len(folders) > 1:
        keys = _by_name([dict(flatten_keys(run_summary.read_keys(each))) for each in folders])
        differ = {key: values for key, values in keys.items() if len({*values}) > 1}
        same = "their recipes are the same"
        console.print(_make_table("recipe", marks, differ, right=False) if differ else same)
        if scores := figures.get("last validation") or figures.get("last loss"):
            best = min(scores, key=lambda score: float(score.replace("nan", "") or "inf"))
            marks[scores.index(best)] += " best"
    console.print(_make_table("figures", marks, figures, right=True))


def _by_name(runs: Sequence[Mapping[str, object]], no: str = "not there") -> dict[str, list[str]]:
    return {k: [str(run.get(k, no)) for run in runs] for each in runs for k in each}


def _make_table(
    title: str, marks: Sequence[str], rows: Mapping[str, Sequence[str]], *, right: bool
) -> Table:
    """Make a table with a column for each run, or with a row for each of more than two."""
    lines = ((name, *values) for name, values in rows.items())
    if len(marks) < 3:
        return plain_table(title, ("", *marks), lines, right=marks if right else ())
    shown = {name: row for name, row in rows.items() if not name.startswith(_LEFT_OUT)}
    cells = zip(marks, *shown.values(), strict=True)
    return plain_table(title, ("", *shown), cells, whole=("", "status"))


def _figures_of(folder: Path) -> dict[str, str]:
    """Return what there is to say of a run, by name."""
    run, losses = run_summary.summarize(folder), read_losses(folder / METRICS)
    figures = {"status": run.status, "steps": f"{run.done:,}"}
    if losses["loss"]:
        figures["first loss"] = show_loss(losses["loss"][0][1])
    for name, points in losses.items():
        if points:
            step, lowest = min(points, key=lambda point: point[1])
            figures[f"last {name}"] = show_loss(points[-1][1])
            figures[f"lowest {name}"] = f"{lowest:.4f} at {step:,}"
    with suppress(OSError, *DAMAGED):  # a run that has not ended has no report
        report = json.loads((folder / REPORT).read_text())
        figures["ranks"] = str(report["ranks"])
        figures["step time"] = seconds(report["measured"]["step_s"])
        figures[f"{report['unit']}/s"] = f"{report['tokens_per_s']:,.0f}"
    return figures


def show_loss(value: float | None) -> str:
    """Write a loss with 4 decimals; nothing for None."""
    return "" if value is None else f"{value:.4f}"
