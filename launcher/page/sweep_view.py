"""sweep_view: the folder of a sweep -> its table, and the folders of its jobs."""

from __future__ import annotations

import csv
import math
from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from flowrun.engine.ir.files import DAMAGED
from flowrun.launcher.page.page_data import SweepCell, SweepView
from flowrun.launcher.report.sweep_table import TABLE, find_best
from flowrun.launcher.store.run_files import RECIPE


def sweep_view(folder: Path) -> SweepView:
    """Read the table of a sweep.  Raises OSError."""
    with (folder / TABLE).open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        names = list(reader.fieldnames or ())
        rows = [{name: _cell(name, text) for name, text in row.items()} for row in reader]
    numbers = names[names.index("reason") + 1 :]
    config = None
    with suppress(OSError, *DAMAGED, yaml.YAMLError):
        config = OmegaConf.load(folder / "multirun.yaml")
    best, objective, highest = find_best(rows, config)
    return SweepView(
        keys=tuple(names[1 : names.index("status")]),
        numbers=tuple(numbers),
        rows=tuple(rows),
        objective=objective,
        highest=highest,
        best=best,
    )


def job_folders(folder: Path, sweep: SweepView) -> list[Path]:
    """Return the folders of the jobs that have begun to run, in their order."""
    folders = (folder / str(row["job"]) for row in sweep.rows)
    return [each for each in folders if (each / RECIPE).exists()]


def _cell(name: str, text: str) -> SweepCell:
    """Return a number as such, null where it is not finite; that of a job stays text."""
    with suppress(ValueError):
        if name == "job":
            return text
        value = float(text)
        return value if math.isfinite(value) else None
    return text or None
