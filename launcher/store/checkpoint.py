"""Checkpoints of a run: RUN_DIR/checkpoints/step_00000200, complete or not there at all.

The ranks write the tensors, with checksums (engine/runtime/rank/shard_file.py), to a folder of
another name.  When all have, the launcher adds recipe.yaml, which trained it, and checkpoint.json
with all checksums, and renames it: a run that is killed leaves the last good one.  Nothing more is
needed: the samples of a step, its learning rate and its random numbers are functions of the seed
and the step.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.ir.files import PARTIAL, drop_partial, remove, replace_text, sync
from flowrun.launcher.store.run_files import RECIPE
from flowrun.models.lora import AdaptedWeights

FOLDER, ABOUT = "checkpoints", "checkpoint.json"
WEIGHTS, AVERAGES = "weights.safetensors", "ema.safetensors"  # of a run's end (weight_files.py)
_SUM = "crc32"  # of checkpoint.json itself
_STEP = re.compile(r"step_(\d{8,})")  # a user may keep copies: step_00000200_copy
_LEFT = re.compile(r"(gone_)?step_\d{8,}\.partial")
_PIECE = 1 << 22  # bytes that are summed while they are in the cache


@dataclass(frozen=True)
class About:
    """The content of checkpoint.json.

    step: steps done.  names: of model.state_dict() -> tensor that it is.  validation: numbers of
    the evaluation after that step, if there was one.  files: size and CRC-32 of each other file.
    samples: of the data set, with those that are held out.  digests: of its documents and its
    tokenizers, by name.  adapters: of the model; None: it has none.  trained: parameter -> steps
    before its first update; None: of an earlier flowrun, that did not say it.  evaluations: steps
    and results of all that there were, where the learning rate follows them.
    """

    step: int
    seed: int
    batch_size: int
    names: Mapping[str, str]
    validation: Mapping[str, float | None] = field(default_factory=dict)
    files: Mapping[str, Sequence[int]] = field(default_factory=dict)
    samples: int | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    adapters: AdaptedWeights | None = None
    trained: Mapping[str, int] | None = None
    evaluations: Sequence[tuple[int, Mapping[str, float | None]]] = ()

    def to_json(self) -> str:
        """Return the text of checkpoint.json, with a checksum of itself."""
        found = asdict(self)
        return json.dumps({**found, _SUM: _checksum(found)}, indent=1)

    @staticmethod
    def from_json(text: str) -> About:
        """Read what to_json wrote.  Raises ValueError if it was changed."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.pop(_SUM, None) != _checksum(found):
            raise ValueError("its checksum does not fit")
        return About.of_mapping(found)

    @staticmethod
    def of_mapping(found: dict[str, Any]) -> About:
        """Return what dataclasses.asdict made a mapping of."""
        adapters = found.pop("adapters", None)
        return About(**found, adapters=AdaptedWeights.of_json(adapters) if adapters else None)


def _checksum(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.  step: steps done."""

    folder: Path
    step: int
    ended = True  # evaluation comes before the checkpoint of a step
    fresh = False

    def about(self) -> About:
        """The content of checkpoint.json, as it was when it was first asked for."""
        return self._about

    @cached_property
    def _about(self) -> About:
        return About.from_json((self.folder / ABOUT).read_text(encoding="utf-8"))

    def text(self) -> str:
        """The text of checkpoint.json; "" if it has been removed."""
        with suppress(FileNotFoundError):
            return (self.folder / ABOUT).read_text(encoding="utf-8")
        return ""

    @property
    def checksum(self) -> str:
        """Return the checksum of checkpoint.json, and so of all its files."""
        return f"{zlib.crc32(self.text().encode()):08x}"

    def has_files(self) -> bool:
        """True if it has all files that checkpoint.json names, which not all that is fetched has.

        Their content is not looked at.
        """
        with suppress(OSError, ValueError, TypeError):
            return all((self.folder / name).exists() for name in self.about().files)
        return False

    def recipe(self) -> Mapping[str, Any]:
        """Keys of the recipe that trained it.  Raises ValueError if the file has none."""
        found = yaml.safe_load((self.folder / RECIPE).read_text(encoding="utf-8"))
        if not isinstance(found, Mapping):
            raise ValueError("no mapping of keys")
        return found

    def damage(self) -> str:
        """Say what is wrong with its files; "" if all are as they were written."""
        try:
            about = replace(self).about()  # as it is now
        except FileNotFoundError:
            return f"{ABOUT}: it is missing."
        except (OSError, ValueError, TypeError) as error:
            return f"{ABOUT}: it is damaged: {error}."
        if about.step != self.step:
            return f"{ABOUT}: it is of step {about.step}."
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # zlib releases the GIL
            found = pool.map(
                lambda file: damage_of(self.folder / file[0], *file[1]), about.files.items()
            )
            return next(filter(None, found), "")


def damage_of(file: Path, num_bytes: int, checksum: int) -> str:
    try:
        size = file.stat().st_size
        if size != num_bytes:
            return f"{file.name}: it has {size:,} bytes of {num_bytes:,}."
        if _checksum_of(file) != checksum:
            return f"{file.name}: it has changed since it was written."
    except FileNotFoundError:
        return f"{file.name}: it is missing."
    except OSError as error:
        return f"{file.name}: it cannot be read: {error.strerror}."
    return ""


def _checksum_of(file: Path) -> int:
    """Return the CRC-32 of a file, which finds the faults of a disk, not forgery."""
    crc = 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def find_all(run_folder: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first."""
    found = ((_STEP.fullmatch(file.name), file) for file in (run_folder / FOLDER).glob("step_*"))
    every = (Checkpoint(file, int(match[1])) for match, file in found if match and file.is_dir())
    return sorted(every, key=lambda checkpoint: checkpoint.step)


def find_whole(found: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the newest whole one of some checkpoints, oldest first; None if there is none."""
    return next((each for each in reversed(found) if not each.damage()), None)


def find_step(run_folder: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint from which hosts of a run go on; None at step 0.  Raises RunError."""
    found = next((kept for kept in find_all(run_folder) if kept.step == step), None)
    if step and not found:
        raise RunError(
            "hydra.run.dir",
            f"hosts go on from step {step}, of which {run_folder} has no checkpoint here.",
            "Start the hosts again: they agree on a checkpoint that one of them has.",
        )
    return found


@contextmanager
def lock_run_folder(run_folder: Path, hosts: int) -> Iterator[None]:
    """Keep other runs of this machine out of a folder.  Raises RecipeError if one writes there."""
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

    Raises RecipeError as `check_new`.
    """
    check_new(run_folder, resumed)
    remove_partial(run_folder)


def check_new(run_folder: Path, resumed: bool) -> None:
    """Raise RecipeError where a new run would mix its checkpoints with those of another."""
    if find_all(run_folder) and not resumed:
        raise RecipeError(
            "hydra.run.dir",
            f"{run_folder} has checkpoints of another run.",
            f"flowrun resume {run_folder} goes on with it; a new run needs another folder.",
        )


def remove_partial(run_folder: Path) -> None:
    """Remove what ranks that have ended left half written."""
    for left in (run_folder / FOLDER).glob(f"*{PARTIAL}"):
        if _LEFT.fullmatch(left.name):
            remove(left)
    for file in (WEIGHTS, AVERAGES):
        half = run_folder / f"{file}{PARTIAL}"
        if half.is_symlink() or half.is_file():  # a folder of this name is a user's own
            half.unlink()
    drop_partial(run_folder)


def partial_folder(run_folder: Path, step: int) -> Path:
    """Return the folder that all ranks fill, which `complete` renames."""
    return run_folder.absolute() / FOLDER / f"step_{step:08d}{PARTIAL}"


def complete(folder: Path, about: About, recipe: str) -> Checkpoint:
    """Make a checkpoint count: all ranks have filled `folder`, and metrics.jsonl has its steps."""
    for left in folder.iterdir():  # of ranks that were killed, and are others now
        if left.name not in about.files:
            left.unlink()
    content = recipe.encode()
    sums = {RECIPE: (len(content), zlib.crc32(content))}
    replace_text(folder / RECIPE, recipe)
    return publish(folder, about.step, replace(about, files={**about.files, **sums}).to_json())


def publish(folder: Path, step: int, text: str) -> Checkpoint:
    """Give a checkpoint its name, whose files are all in its partial folder but checkpoint.json.

    text: of checkpoint.json.
    """
    replace_text(folder / ABOUT, text)
    done = folder.with_name(folder.name.removesuffix(PARTIAL))
    if done.exists():  # of a run that was gone back on
        _remove(done)
    sync(folder)
    folder.rename(done)
    sync(done.parent)
    return Checkpoint(done, step)


def prune(newest: Checkpoint, keep: int, best: str, due: int, busy: Collection[int]) -> None:
    """Remove the checkpoints of a run that do not stay.

    keep: the number of newest checkpoints that stay; 0: all.  best: the one that is best by this
    stays, too (train.keep_best).  due: so does the newest whose steps are a multiple of it; 0: none
    does.  busy: steps of those that are being read, which stay, too.  Later ones than `newest`, of
    a run that was resumed from an earlier step, are removed.
    """
    found = find_all(newest.folder.parents[1])
    there = [each for each in found if each.step <= newest.step]
    kept = {*(there[-keep:] if keep else there), find_best(there, best)}
    kept |= set([each for each in there if due and each.step % due == 0][-1:])
    kept |= {each for each in there if each.step in busy}
    for old in found:
        if old not in kept:
            _remove(old.folder)


def find_best(found: Sequence[Checkpoint], best: str) -> Checkpoint | None:
    """Return the earliest checkpoint with the lowest number of a name; -NAME: the highest."""
    name, sign = best.removeprefix("-"), -1 if best.startswith("-") else 1
    values = {}
    for checkpoint in found if name else ():
        with suppress(OSError, ValueError, TypeError):  # a damaged one is nobody's best
            value = checkpoint.about().validation.get(name)
            if value is not None and math.isfinite(value):
                values[checkpoint] = sign * value
    return min(values, key=lambda checkpoint: values[checkpoint], default=None)


def _remove(folder: Path) -> None:
    """A checkpoint: what is left of it, if this is cut short, does not count as one."""
    gone = folder.with_name(f"gone_{folder.name}{PARTIAL}")
    folder.rename(gone)
    shutil.rmtree(gone)
