"""Plans that were made before: the same job, code and torch need no capture and no compiler.

A plan is a function of what `Job` hands to the compiler (its digest, with the place of this code,
is the file's name) and of the source files of all that was imported to make it (listed in the
file).  Nothing in it depends on the values of weights or data.  The files are pickles of our own
types, in a folder that only the user can write: $XDG_CACHE_HOME/flowrun, or ~/.cache/flowrun.
"""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrun.engine.compile import Rehearsed
from flowrun.launcher.digest import Undigested, digest

MOST_FILES, MOST_BYTES = 100, 1 << 29  # what the folder may hold; the longest unused goes first
_SUFFIX = ".plan"
_ROOT = str(Path(__file__).resolve().parents[1])  # another checkout may hold other code

Stamp = tuple[str, int, int]  # a source file: path, bytes, ns when it was changed


@dataclass(frozen=True)
class Kept:
    """What a file holds."""

    sources: tuple[Stamp, ...]
    rehearsed: Rehearsed


class PlanCache:
    """The plans of one job.  used: False makes each anew, and keeps none.  parts: all that they are
    made of.  notes: what went otherwise than a user expects.  elsewhere: source files that another
    process has imported to make them.
    """

    def __init__(self, used: bool, *parts: Any) -> None:
        self.notes: list[str] = []
        self.elsewhere: set[str] = set()
        self._key: str | None = None
        if not used:
            return
        try:
            self._key = digest(
                parts, _ROOT, torch.__version__, torch.version.git_version, sys.version
            )
        except Undigested as error:
            self.notes.append(f"no plan is kept: a {error} does not show what it is made of")

    def get(self, kind: str, make: Callable[[], Rehearsed]) -> Rehearsed:
        """The plan of a kind (training, evaluation), from disk or made, and then kept."""
        file = self._file(kind)
        return make() if file is None else self._read(file) or self._made(file, make)

    def has(self, kind: str) -> bool:
        """Whether there is a file of it, which may be broken or out of date."""
        file = self._file(kind)
        return file is not None and file.exists()

    def _file(self, kind: str) -> Path | None:
        """None: no plan is kept."""
        return folder() / f"{kind}-{self._key[:32]}{_SUFFIX}" if self._key else None

    def _read(self, file: Path) -> Rehearsed | None:
        try:
            if not file.exists():
                return None
            with file.open("rb") as opened:
                kept = pickle.load(opened)
            assert isinstance(kept, Kept)
            changed = next((stamp for stamp in kept.sources if _stamp(stamp[0]) != stamp), None)
            if changed is None:
                os.utime(file)
                return kept.rehearsed
            self.notes.append(f"the plan is made anew: {changed[0]} has changed")
        except Exception as error:  # whatever a pickle of another time may raise
            self.notes.append(f"the plan is made anew: {file} is broken ({_told(error)})")
        return None

    def _made(self, file: Path, make: Callable[[], Rehearsed]) -> Rehearsed:
        made = make()
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as opened:
                stamps = tuple(map(_stamp, sorted(source_files() | self.elsewhere)))
                pickle.dump(Kept(stamps, made), opened, protocol=pickle.HIGHEST_PROTOCOL)
            os.replace(opened.name, file)
            _tidy(file.parent)
        except OSError as error:
            self.notes.append(f"no plan is kept in {file.parent}: {_told(error)}")
        return made


def folder() -> Path:
    """Where plans are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowrun"


def source_files() -> set[str]:
    """All Python files imported so far, but for torch's and Python's own."""
    torchs, pythons = f"{Path(torch.__file__).parent}/", sysconfig.get_path("stdlib")
    packages = sysconfig.get_path("purelib")
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return {
        path
        for path in files
        if path.endswith(".py") and not path.startswith(torchs)
        if path.startswith(packages) or not path.startswith(pythons)
    }


def _stamp(path: str) -> Stamp:
    """Zeros if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, found.st_size, found.st_mtime_ns


def _tidy(where: Path) -> None:
    """Keep within the limits."""
    kept = sorted(where.glob(f"*{_SUFFIX}"), key=lambda file: -file.stat().st_mtime)
    total = 0
    for k, file in enumerate(kept):
        total += file.stat().st_size
        if k >= MOST_FILES or (k and total > MOST_BYTES):
            file.unlink(missing_ok=True)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
