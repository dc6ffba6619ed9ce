"""The lease of a run's folder: whose launcher writes there, renewed every few seconds.

A lock of the system (`lock_run_folder` of store/checkpoint.py) keeps other runs of this machine
away.  The lease does so for those of other machines, which see the folder but no lock: the first
host of a run holds it.  A launcher that was killed leaves its lease behind; it counts as long as
its process lives, or, of another machine, until it was not renewed for some beats.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.ir.files import is_running, replace_text

FILE = ".lease"
BEAT_S = 2.0
_BEATS = 3  # without one a lease of another machine is void
_LOOK_S = 0.1


@dataclass(frozen=True)
class Owner:
    """Who holds a folder.  machine, process: its launcher.  run: the hosts that train together: one
    may take the lease of another.
    """

    machine: str
    process: int
    run: str

    @staticmethod
    def of_this(endpoint: str, token: str) -> Owner:
        """Return this launcher.  endpoint, token: of its hosts; empty: it is alone."""
        run = hashlib.sha256(f"{endpoint} {token}".encode()).hexdigest()[:16] if endpoint else ""
        return Owner(platform.node(), os.getpid(), run)


class Lease:
    """The lease of a folder, as far as this launcher holds it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._owner: Owner | None = None

    def take(self, owner: Owner) -> None:
        """Take the lease for this launcher.  Raises RecipeError if another run's holds it."""
        if self._owner == owner:
            return
        before = self._read()
        if before and _may_live(before, owner) and self._is_renewed():
            raise RecipeError(
                "hydra.run.dir",
                f"another run is writing to {self._file.parent}: process {before.process} on"
                f" {before.machine}.",
                "Give each run a folder of its own: hydra.run.dir=outputs/NAME.",
            )
        replace_text(self._file, json.dumps(asdict(owner)) + "\n")
        self._owner = owner

    def renew(self) -> None:
        """Say that this launcher lives.  Raises RunError if another has taken the folder."""
        if self._owner is None:
            return
        if (there := self._read()) != self._owner:
            who = f"process {there.process} on {there.machine}" if there else "another run"
            folder, self._owner = self._file.parent, None
            if folder.exists() and there:
                raise RunError(str(folder), f"{who} has taken the folder of this run.")
            return  # the folder was removed, which the next step's line notices
        os.utime(self._file)

    def release(self) -> None:
        """Leave the folder to others."""
        if self._owner is not None and self._read() == self._owner:
            with suppress(OSError):
                self._file.unlink()
        self._owner = None

    def _read(self) -> Owner | None:
        try:
            return Owner(**json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _is_renewed(self) -> bool:
        """Watch the lease of another machine for some beats."""
        with suppress(FileNotFoundError):
            first = self._file.stat().st_mtime_ns
            until = time.monotonic() + _BEATS * BEAT_S
            while time.monotonic() < until:
                if self._file.stat().st_mtime_ns != first:
                    return True
                time.sleep(_LOOK_S)
        return False


def _may_live(before: Owner, owner: Owner) -> bool:
    """Return whether the launcher of a lease may be another run's, and live."""
    if before.run and before.run == owner.run:
        return False  # the hosts agree on who is first
    elsewhere = before.machine != owner.machine
    return elsewhere or (before.process != owner.process and is_running(before.process))
