"""sweep_view: the folder of a sweep -> its table, and the folders of its jobs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from flowrun.engine.ir.files import DAMAGED
from flowrun.launcher.page.page_data import SweepCell, SweepView
from flowrun.launcher.recipe.schema import VALIDATION
from flowrun.launcher.report.sweep_table import RAN, TABLE
from flowrun.launcher.store.run_files import RECIPE

# a metric of such a name is best if high
_HIGHEST = ("tokens_per_s", "accuracy", "hit_rate", "auc", "f1")
_LOSSES = ("validation_loss", "loss")


def sweep_view(folder: Path) -> SweepView:
    """Read the table of a sweep.  Raises OSError."""
    with (folder / TABLE).open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        names = list(reader.fieldnames or ())
        rows = [{name: _cell(name, text) for name, text in row.items()} for row in reader]
    numbers = names[names.index("reason") + 1 :]
    objective, highest = _objective(folder, rows, numbers)
    known = {
        k: value
        for k, row in enumerate(rows)
        if row["status"] == RAN and isinstance(value := row.get(objective), float)
    }
    best = (max if highest else min)(known, key=known.__getitem__) if known else -1
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


def _objective(
    folder: Path, rows: Sequence[Mapping[str, SweepCell]], numbers: Sequence[str]
) -> tuple[str, bool]:
    """Return the number that the sweep looks at, and whether the highest is best: the sweeper's
    objective, or a loss.
    """
    keys: Mapping[str, Mapping[str, object]] = {}
    with suppress(OSError, *DAMAGED, yaml.YAMLError):
        keys = yaml.safe_load((folder / "multirun.yaml").read_text(encoding="utf-8")) or {}
    asked = str((keys.get("sweep") or {}).get("objective") or "")
    objective = asked.replace(VALIDATION, "validation_")
    if objective not in numbers:
        given = {name for row in rows for name, value in row.items() if value is not None}
        objective = next((name for name in _LOSSES if name in given), "loss")
    sweeper = (keys.get("hydra") or {}).get("sweeper")
    direction = sweeper.get("direction") if isinstance(sweeper, Mapping) else None
    guessed = any(name in objective for name in _HIGHEST)
    return objective, direction == "maximize" if direction else guessed
