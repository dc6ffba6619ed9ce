"""flowrun runs: list the runs of a folder, show one, compare two, follow one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.key_trees import flatten_keys
from flowrun.launcher.recipe.recipe_errors import PlacedError
from flowrun.launcher.report.loss_curve import LossCurve, plot_text, read_curve
from flowrun.launcher.report.record import ENDED, LOGS, METRICS
from flowrun.launcher.report.report import REPORT
from flowrun.launcher.store.checkpoint import RECIPE
from flowrun.launcher.terminal.units import seconds

FOLDERS = ("outputs", "multirun", "runs")  # where runs lie if no folder is named
RUNNING, DIED = "running", "died"
_TAIL = 1 << 16  # bytes of metrics.jsonl that a list reads
_SILENT_S = 120.0  # a run of several hosts that writes nothing for so long has died
_WIDE = 100  # columns from which a list has the recipe, too
_SHOWN = 1000  # bytes of what is there that `follow` begins with
_LOOK_S = 1.0
_UNITS = ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "hours"), (120, 60, "minutes"))


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run, by what its folder says.

    name: of the recipe.  asked: its steps; 0: by epochs.  done: steps that are recorded.  loss: of
    the last of them.  status: running, complete, ended by a callback, preempted, stopped, failed,
    or died.  time: when it was last written to.
    """

    folder: Path
    name: str
    asked: int
    done: int
    loss: float | None
    validation: float | None
    status: str
    time: float


def show(folders: Sequence[Path], followed: Path | None, console: Console) -> None:
    """Do what the command is asked.

    folders: a folder of runs, a run, or two runs.  followed: a run to follow.  console: to print
    to.  Raises RecipeError.
    """
    if followed:
        follow(followed, console)
    elif folders and all((folder / RECIPE).exists() for folder in folders):
        if len(folders) > 2:
            raise PlacedError(
                "command line", str(folders[2]), "two runs are compared, and this is a third."
            )
        compare(folders, console)
    elif len(folders) > 1 or any(not folder.is_dir() for folder in folders):
        wrong = next(folder for folder in folders if not (folder / RECIPE).exists())
        read_keys(wrong)
    else:
        list_runs(folders or [Path(name) for name in FOLDERS if Path(name).is_dir()], console)


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs that lie in some folders, the newest last."""
    found = {
        file.parent
        for folder in folders
        for file in folder.rglob(METRICS)
        if (file.parent / RECIPE).exists()
    }
    whole = [folder for folder in found if folder.parent not in found]  # no host's part of one
    return sorted(whole, key=lambda folder: (folder / METRICS).stat().st_mtime)


def summarize(folder: Path) -> RunSummary:
    """Read a run's folder.  Raises RecipeError where it is none."""
    keys = read_keys(folder)
    step, losses = -1, {"loss": None, "validation": None}
    for line in _tail(folder / METRICS):
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(line)
            step = int(found["step"])
            if "validation" in found:
                losses["validation"] = found["validation"].get("loss")
            else:
                losses["loss"] = found["loss"]
    metrics = folder / METRICS
    return RunSummary(
        folder=folder,
        name=str(keys.get("name") or ""),
        asked=0 if keys["train"].get("epochs") else int(keys["train"]["steps"]),
        done=step + 1,
        loss=losses["loss"],
        validation=losses["validation"],
        status=find_status(folder, keys),
        time=(metrics if metrics.exists() else folder / RECIPE).stat().st_mtime,
    )


def read_keys(folder: Path) -> Mapping[str, Any]:
    """Return the keys of the recipe of a run.  Raises RecipeError."""
    try:
        keys = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
        keys["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        raise PlacedError(
            "command line",
            str(folder),
            f"this is no folder of a run: it has no {RECIPE} with train.steps.",
            "flowrun runs lists those that there are.",
        ) from None
    return keys  # type: ignore[no-any-return]


def find_status(folder: Path, keys: Mapping[str, Any]) -> str:
    """Say in a word whether a run goes on, or how it has ended.  keys: of its recipe."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        by = json.loads((folder / REPORT).read_text()).get("ended_by")
        return f"ended by {by}" if by else "complete"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / ENDED).read_text())["status"])
    if is_locked(folder):
        return RUNNING
    if str(keys.get("launch", {}).get("nnodes", 1)) != "1":  # hosts that share a folder lock none
        with suppress(OSError):
            if time.time() - (folder / METRICS).stat().st_mtime < _SILENT_S:
                return RUNNING
    return DIED


def is_locked(folder: Path) -> bool:
    """True if a process of this host holds the lock of a run's folder (store/checkpoint.py)."""
    with suppress(OSError):
        about = folder.stat()
        place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        return any(place in line.split() for line in Path("/proc/locks").read_text().splitlines())
    return False


def _tail(file: Path) -> list[str]:
    """Return the last lines of a file, the first of them maybe cut off."""
    with suppress(OSError), file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _TAIL))
        return stream.read().decode("utf-8", "replace").splitlines()
    return []


def age(past_s: float) -> str:
    """Write a duration as people do: "3 minutes"."""
    for least, unit_s, name in _UNITS:
        if past_s >= least:
            return f"{past_s / unit_s:.0f} {name}"
    return f"{max(0.0, past_s):.0f} s"


def list_runs(folders: Sequence[Path], console: Console) -> None:
    """Print a line for each run, the newest last."""
    runs = [_summary_or_none(folder) for folder in find_runs(folders)]
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold", min_width=18)
    wide = console.width >= _WIDE
    if wide:  # it is part of the folder's name
        table.add_column("recipe", no_wrap=True)
    for heading in ("steps", "loss", "valid.", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for run in filter(None, runs):
        table.add_row(
            str(run.folder),
            *([run.name] if wide else []),
            f"{run.done:,}/{run.asked:,}" if run.asked else f"{run.done:,}",
            _number(run.loss),
            _number(run.validation),
            age(time.time() - run.time),
            run.status,
            style=None if run.status in ("complete", RUNNING) else "yellow",
        )
    if not table.row_count:
        where = ", ".join(map(str, folders)) or " or ".join(FOLDERS)
        console.print(f"there is no run in {where}: flowrun recipe=mlp_hybrid makes one")
        return
    console.print(table)
    console.print(
        "flowrun runs A B compares two, flowrun runs --follow A shows how one goes on", style="dim"
    )


def _summary_or_none(folder: Path) -> RunSummary | None:
    with suppress(RecipeError):
        return summarize(folder)
    return None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def compare(folders: Sequence[Path], console: Console) -> None:
    """Show a run, or two side by side: what differs in their recipes, figures, curves."""
    runs = [summarize(folder) for folder in folders]
    curves = [read_curve(folder / METRICS) for folder in folders]
    marks = ["●", "○"][: len(runs)]
    for mark, run in zip(marks, runs, strict=True):
        console.print(f"{mark} {run.folder}", soft_wrap=True)
        if (logs := run.folder / LOGS).is_dir():
            console.print(f"  what its ranks printed: {logs}/", soft_wrap=True, style="dim")
    if len(runs) > 1:
        console.print(_difference(folders))
    console.print(_figures(runs, curves))
    points = [curve.training for curve in curves]
    if all(points):
        for line in plot_text(points, min(console.width, 100)):
            console.print(line, markup=False)


def _difference(folders: Sequence[Path]) -> Table | str:
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


def _figures(runs: Sequence[RunSummary], curves: Sequence[LossCurve]) -> Table:
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
    reports = [_report(run.folder) for run in runs]
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


def _report(folder: Path) -> Mapping[str, Any] | None:
    with suppress(OSError, ValueError):
        found: Mapping[str, Any] = json.loads((folder / REPORT).read_text())
        return found
    return None


def _point(points: Sequence[tuple[float, float]]) -> str:
    return _number(points[0][1]) if points else ""


def _best(point: tuple[float, float] | None) -> str:
    return f"{point[1]:.4f} at {point[0]:,.0f}" if point else ""


def follow(folder: Path, console: Console, sleep: Callable[[float], object] = time.sleep) -> str:
    """Print the steps of a run as they come, one line a look; return its status when it has ended.

    folder: of the run.  console: to print to.  sleep: waits between two looks.
    """
    keys, metrics = read_keys(folder), folder / METRICS
    at = max(0, metrics.stat().st_size - _SHOWN) if metrics.exists() else 0
    while True:
        status = find_status(folder, keys)
        text, at = _read_lines(metrics, at)
        lines = [found for line in text.splitlines() if (found := _describe_line(line))]
        evaluations = [line for line in lines if "validation" in line]
        for line in dict.fromkeys([*evaluations, *lines[-1:]]):
            console.print(line, highlight=False, markup=False)
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


def _describe_line(line: str) -> str:
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(line)
        if "validation" in found:
            values = ", ".join(
                f"{name} {value:.4f}"
                for name, value in found["validation"].items()
                if isinstance(value, float)
            )
            return f"step {found['step']}  validation {values}"
        return f"step {found['step']}  loss {found['loss']:.4f}  {found['tokens_per_s']:,.0f}/s"
    return ""
