"""The lease of a run's folder: whose launcher writes there, renewed every few seconds.

A lock of the system (`lock_run_folder` of store/checkpoint.py) keeps other runs of this machine
away.  The lease does so for those of other machines, which see the folder but no lock: the first
host of a run holds it.  A launcher that was killed leaves its lease behind; it counts as long as
its process lives, or, of another machine, until it was not renewed for some beats.

Where the first host is lost, or was only silent, another takes the lease at once, by a later epoch
(hosts/hub.py).  Nobody writes a line of metrics.jsonl or a checkpoint.json before a look at the
lease: the one that was silent ends there.  One that may live on another machine has some beats to
notice, as what it sees of the folder may be old.
"""

from __future__ import annotations

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
    """Who holds a folder.  machine, process: its launcher.  epoch: of its hub; a later one counts.
    door: where other hosts come to it.
    """

    machine: str
    process: int
    epoch: int
    door: str

    @staticmethod
    def of_this(epoch: int = 0, door: str = "") -> Owner:
        return Owner(platform.node(), os.getpid(), epoch, door)

    def __str__(self) -> str:
        return f"process {self.process} on {self.machine}"


class Lease:
    """The lease of a folder, as far as this launcher holds it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._owner: Owner | None = None

    def take(self, owner: Owner, follows: bool = False) -> None:
        """Take the lease for this launcher.  follows: it was a host of the run, and takes the place
        of the first.  Raises RecipeError if another run's holds it, RunError as `check`.
        """
        if self._owner == owner:
            self.check()
            return
        before, lives = self.read(), False
        if before and (before.machine, before.process) != (owner.machine, owner.process):
            if follows and before.epoch >= owner.epoch:
                raise self._lost_to(before)
            lives = before.machine != owner.machine or is_running(before.process)
            if lives and not follows and self._is_renewed():
                raise RecipeError(
                    "hydra.run.dir",
                    f"another run is writing to {self._file.parent}: {before}.",
                    "Give each run a folder of its own: hydra.run.dir=outputs/NAME.",
                )
        replace_text(self._file, json.dumps(asdict(owner)) + "\n")
        self._owner = owner
        if lives and follows:
            time.sleep(_BEATS * BEAT_S)
            self.check()

    def check(self) -> None:
        """Raise RunError if another has taken the folder."""
        if self._owner is None or (there := self.read()) == self._owner:
            return
        unreadable = there is None and self._file.exists()
        if unreadable or not self._file.parent.exists():  # removed: the next step's line notices
            return
        self._owner = None
        raise self._lost_to(there)

    def renew(self) -> None:
        """Say that this launcher lives.  Raises RunError as `check`."""
        self.check()
        if self._owner is not None:
            os.utime(self._file)

    def release(self) -> None:
        """Leave the folder to others."""
        if self._owner is not None and self.read() == self._owner:
            with suppress(OSError):
                self._file.unlink()
        self._owner = None

    def _lost_to(self, there: Owner | None) -> RunError:
        who = there or "another launcher, which has ended,"
        return RunError(str(self._file.parent), f"{who} has taken the folder of this run.")

    def read(self) -> Owner | None:
        """Return who holds the folder, or has left the lease behind."""
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
