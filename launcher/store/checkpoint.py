"""Checkpoints of a run: RUN_DIR/checkpoints/step_00000200, complete or not there at all.

One is written by all ranks under another name, and renamed by the launcher, so that a run that is
killed leaves the last good one.  With the tensors (engine/runtime/drivers/logical_checkpoint.py)
it holds recipe.yaml, which trained it, and checkpoint.json.  Nothing more is needed: the samples of
a step, its learning rate and its random numbers are functions of the seed and the step.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from flowrun.engine.errors import RecipeError

FOLDER, ABOUT, RECIPE = "checkpoints", "checkpoint.json", "recipe.yaml"
WEIGHTS, AVERAGES = "weights.safetensors", "ema.safetensors"  # of a run's end (weight_files.py)
PARTIAL = ".partial"  # ends the name of what is not complete yet
_STEP = re.compile(r"step_(\d{8,})")  # a user may keep copies: step_00000200_copy
_LEFT = re.compile(r"(gone_)?step_\d{8,}\.partial")


@dataclass(frozen=True)
class About:
    """checkpoint.json.  step: steps done.  names: of model.state_dict() -> tensor that it is."""

    step: int
    seed: int
    batch_size: int
    names: Mapping[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.  step: steps done."""

    folder: Path
    step: int

    def about(self) -> About:
        """The content of checkpoint.json."""
        return About(**json.loads((self.folder / ABOUT).read_text()))

    def recipe(self) -> Mapping[str, Any]:
        """Keys of the recipe that trained it.  Raises ValueError if the file has none."""
        found = yaml.safe_load((self.folder / RECIPE).read_text(encoding="utf-8"))
        if not isinstance(found, Mapping):
            raise ValueError("no mapping of keys")
        return found


def find_all(run_folder: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first."""
    found = ((_STEP.fullmatch(file.name), file) for file in (run_folder / FOLDER).glob("step_*"))
    every = (Checkpoint(file, int(match[1])) for match, file in found if match and file.is_dir())
    return sorted(every, key=lambda checkpoint: checkpoint.step)


@contextmanager
def alone(run_folder: Path, hosts: int) -> Iterator[None]:
    """Within, no other run writes to the folder; hosts of one run may share it.  Raises RecipeError
    if another does.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    if hosts > 1:
        yield
        return
    handle = os.open(run_folder, os.O_RDONLY)  # the lock goes with the process, whatever ends it
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                "hydra.run.dir",
                f"another run is writing to {run_folder}; it may have started in the same second.",
                "Give each run a folder of its own: hydra.run.dir=outputs/NAME.",
            ) from None
        yield
    finally:
        os.close(handle)


def prepare(run_folder: Path, resumed: bool) -> None:
    """Remove what a killed run left half written, and nothing else, before any rank starts.

    Raises RecipeError where a new run would mix its checkpoints with those of another.
    """
    if find_all(run_folder) and not resumed:
        raise RecipeError(
            "hydra.run.dir",
            f"{run_folder} has checkpoints of another run.",
            f"flowrun resume {run_folder} goes on with it; a new run needs another folder.",
        )
    remove_partial(run_folder)


def remove_partial(run_folder: Path) -> None:
    """Remove what ranks that have ended left half written."""
    for left in (run_folder / FOLDER).glob(f"*{PARTIAL}"):
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    for file in (WEIGHTS, AVERAGES):
        left = run_folder / f"{file}{PARTIAL}"
        if left.is_file():
            left.unlink(missing_ok=True)


def begin(run_folder: Path, about: About, recipe: str) -> Path:
    """Make a folder for all ranks to fill, which `complete` renames.

    about: goes to checkpoint.json.  recipe: goes to recipe.yaml.  run_folder: holds checkpoints/.
    """
    folder = run_folder.absolute() / FOLDER / f"step_{about.step:08d}{PARTIAL}"
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(recipe)
    (folder / ABOUT).write_text(json.dumps(asdict(about)))
    return folder


def complete(folder: Path, keep: int) -> Checkpoint:
    """Make a checkpoint count: all ranks have written it, and metrics.jsonl has its steps.

    keep: the number of checkpoints that stay; 0: all.  Later ones, of a run that was resumed from
    an earlier step, are removed.
    """
    done = folder.with_name(folder.name.removesuffix(PARTIAL))
    if done.exists():  # of a run that was gone back on
        _remove(done)
    sync(folder)
    folder.rename(done)
    sync(done.parent)
    found = find_all(done.parents[1])
    newest = next(k for k, checkpoint in enumerate(found, 1) if checkpoint.folder == done)
    for old in found[newest:] + (found[: max(0, newest - keep)] if keep else []):
        _remove(old.folder)
    return found[newest - 1]


def _remove(folder: Path) -> None:
    """A checkpoint: what is left of it, if this is cut short, does not count as one."""
    gone = folder.with_name(f"gone_{folder.name}{PARTIAL}")
    folder.rename(gone)
    shutil.rmtree(gone)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(file: Path, text: str) -> None:
    """Write a file that is whole, old or new, whenever the process ends."""
    partial = file.with_name(f"{file.name}{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(file)
