"""A run by what its folder says: its recipe, how far it is, and whether it goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.files import DAMAGED
from flowrun.engine.ir.own_files import cache_folder
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.report.metric_lines import numbers_of, read_lines
from flowrun.launcher.store.run_files import ENDED, METRICS, RECIPE, REPORT, RESTARTS
from flowrun.launcher.supervise.hands.lease import FILE as LEASE
from flowrun.launcher.supervise.hands.lease import Lease

RUNNING, COMPLETE, DIED = "running", "complete", "died"
NOT_ENDED = "not ended"  # of a run at a URL
_ENDED_BY = "ended by "  # a callback
_TAIL = 1 << 16  # bytes of metrics.jsonl that are read
_SILENT_S = 120.0  # a run of several hosts that does not renew its lease for so long has died


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run, by what its folder says.

    name: of the recipe.  asked: its steps; 0: by epochs.  done: steps that are recorded.  loss: of
    the last of them.  status: running, complete, ended by a callback, preempted, stopped, failed,
    or died.  time: when it was last written to, in seconds since 1970; age_s: seconds since then.
    """

    folder: Path
    name: str
    asked: int
    done: int
    loss: float | None
    validation: float | None
    status: str
    time: float
    age_s: float

    def __str__(self) -> str:
        steps = f"{self.done:,} of {self.asked:,} steps" if self.asked else f"{self.done:,} steps"
        losses = {"loss": self.loss, "validation loss": self.validation}
        shown = [f"{name} {value:.4f}" for name, value in losses.items() if value is not None]
        return ", ".join([f"{self.status}: {steps}", *shown, f"written {self.age_s:.0f} s ago"])

    @property
    def is_well(self) -> bool:
        """Return whether it runs, or has ended as it should."""
        return self.status in (RUNNING, COMPLETE) or self.status.startswith(_ENDED_BY)


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The runs that lie in some folders, the newest last."""

    runs: tuple[RunSummary, ...]


def summarize_all(folders: Sequence[Path]) -> RunList:
    """Read the runs of folders; those that cannot be read are left out."""
    runs: list[RunSummary] = []
    for folder in find_runs(folders):
        with suppress(RecipeError):
            runs.append(summarize(folder))
    return RunList(runs=tuple(runs))


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
    keys, metrics = read_keys(folder), folder / METRICS
    step, validation = read_newest(folder)
    written = (metrics if metrics.exists() else folder / RECIPE).stat().st_mtime
    return RunSummary(
        folder=folder,
        name=str(keys.get("name") or ""),
        asked=0 if keys["train"].get("epochs") else int(keys["train"]["steps"]),
        done=step.get("step", -1) + 1,
        loss=step.get("loss"),
        validation=validation.get("loss"),
        status=find_status(folder),
        time=written,
        age_s=max(0.0, time.time() - written),
    )


def read_newest(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what metrics.jsonl says of the last step, by tag, and of the last evaluation.

    A tag that the last step lacks, such as the memory, which is read once a second, is of the last
    that has it.
    """
    step: dict[str, Any] = {}
    validation: dict[str, Any] = {}
    for text in read_lines(folder / METRICS, -_TAIL)[0]:
        with suppress(*DAMAGED):
            line = json.loads(text)
            found = {tag: None if x is None else float(x) for tag, x in numbers_of(line)}
            if "validation" in line:
                validation = {tag.removeprefix("validation/"): x for tag, x in found.items()}
            else:
                step |= {**found, "step": int(line["step"])}
    return step, validation


def count_restarts(folder: Path) -> int:
    """Return how often the ranks of a run started again."""
    with suppress(OSError):
        return (folder / RESTARTS).read_bytes().count(b"\n")
    return 0


def read_keys(folder: Path) -> Mapping[str, Any]:
    """Return the keys of the recipe of a run.  Raises RecipeError."""
    try:
        keys = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
        int(keys["train"]["steps"] if not keys["train"].get("epochs") else 0)
        dict(keys.get("launch", {}))
    except (OSError, *DAMAGED, yaml.YAMLError):
        raise CommandLineError(
            str(folder),
            f"not a folder of a run: {RECIPE} with train.steps is missing.",
            "flowrun runs lists the folders of runs.",
        ) from None
    return keys  # type: ignore[no-any-return]


def find_status(folder: Path) -> str:
    """Say in a word whether a run is under way, or how it has ended."""
    with suppress(OSError, *DAMAGED):
        by = json.loads((folder / REPORT).read_text()).get("ended_by")
        return f"{_ENDED_BY}{by}" if by else COMPLETE
    with suppress(OSError, *DAMAGED):
        return str(json.loads((folder / ENDED).read_text())["status"])
    if is_locked(folder):
        return RUNNING
    owner = Lease(folder).read()
    with suppress(OSError):
        several = owner and owner.epoch  # hosts, which lock no folder
        if several and time.time() - (folder / LEASE).stat().st_mtime < _SILENT_S:
            return RUNNING
    return NOT_ENDED if cache_folder() in folder.parents else DIED


def is_locked(folder: Path) -> bool:
    """True if a process of this host holds the lock of a run's folder (store/checkpoint.py)."""
    with suppress(OSError):
        about = folder.stat()
        place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        return any(place in line.split() for line in Path("/proc/locks").read_text().splitlines())
    return False
