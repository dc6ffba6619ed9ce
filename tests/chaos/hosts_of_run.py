"""The processes of a run under chaos: start them, strike them, see what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen

import psutil

from chaos.blows import HOST, LAUNCHER, RUN, WORKER, Strike
from chaos.verdicts import Ended
from support.command import FLOWRUN

_MARK = "FLOWRUN_CHAOS"  # environment variable by which all processes of a run are found
_POLL_S = 0.01


class RunHost:
    """A host of a run: a launcher and its workers, in a session of their own."""

    def __init__(self, place: Path, name: str, words: Sequence[str], mark: str) -> None:
        """place: working directory.  name: of the file of its output.  words: of the command line.

        mark: of the run.
        """
        self.log = place / f"{name}.txt"
        environment = {
            **os.environ,
            _MARK: mark,
            "COLUMNS": "160",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(place / "tmp"),
        }
        (place / "tmp").mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            self.process = Popen(
                [*FLOWRUN, *words],
                cwd=place,
                env=environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.struck = False

    def workers(self) -> list[int]:
        """Process ids of its children that run, by rank."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return sorted(child.pid for child in children)
        return []

    def everything(self) -> list[int]:
        """Process ids of the launcher and its workers."""
        return [self.process.pid, *self.workers()]

    def ended(self) -> Ended:
        """How the launcher ended."""
        printed = self.log.read_text(errors="replace")
        return Ended(status=self.process.poll(), printed=printed, struck=self.struck)


class StruckRun:
    """A run of one host or of several, in one folder."""

    def __init__(self, place: Path, name: str, words: Sequence[Sequence[str]]) -> None:
        """place: working directory.  name: begins the names of the files of its output.

        words: of the command line of each host.
        """
        self.mark = uuid.uuid4().hex
        self.hosts = [
            RunHost(place, f"{name}{host}", each, self.mark) for host, each in enumerate(words)
        ]

    @property
    def struck(self) -> list[RunHost]:
        """The hosts whose launchers were hit."""
        return [host for host in self.hosts if host.struck]

    def is_over(self, but: Collection[RunHost] = ()) -> bool:
        """True if the launchers of all hosts have ended.  but: of all others than these."""
        return all(host.process.poll() is not None for host in self.hosts if host not in but)

    def wait(self, within_s: float, but: Collection[RunHost] = ()) -> bool:
        """Wait until all launchers have ended; False if they have not within so many seconds.

        but: the hosts that are not waited for.
        """
        deadline = time.monotonic() + within_s
        while not self.is_over(but):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait_for_workers(self, plan: Path, ranks: int, within_s: float) -> bool:
        """Wait until the workers of all hosts are there.

        plan: file that is written just before they are forked.  ranks: of a host.  within_s: gives
        up after so many seconds; False then, or where the run is over.
        """
        deadline = time.monotonic() + within_s
        while not self.is_over() and time.monotonic() < deadline:
            if plan.exists() and all(len(host.workers()) == ranks for host in self.hosts):
                return True
            time.sleep(_POLL_S)
        return False

    def strike(self, strike: Strike) -> None:
        """Send the signal of a blow to the processes that it hits."""
        blow, host = strike.blow, self.hosts[strike.host]
        struck = self.hosts if blow.target == RUN else [host]
        for each in struck:
            each.struck = blow.target in (LAUNCHER, HOST, RUN)
        if blow.target == WORKER:
            hit = host.workers()[strike.local_rank :][:1]
        elif blow.target == LAUNCHER:
            hit = [host.process.pid]
        elif blow.target in (HOST, RUN):
            hit = [pid for each in struck for pid in each.everything()]
        else:
            hit = host.workers()
        for pid in hit:
            _send(pid, blow.number)

    def wake(self) -> None:
        """Let a host that was stopped go on, for its run is over elsewhere."""
        for host in self.hosts:
            if host.struck:
                for pid in host.everything():
                    _send(pid, signal.SIGCONT)

    def left(self) -> list[str]:
        """What still runs of it."""
        return [f"{process.pid} {process.status()}" for process in self._processes()]

    def kill(self) -> None:
        """End whatever is left."""
        for process in self._processes():
            _send(process.pid, signal.SIGKILL)
        for host in self.hosts:
            host.process.wait()

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self.mark:
                    found.append(process)
        return [each for each in found if _runs(each)]


def _runs(process: psutil.Process) -> bool:
    """False for one that has ended and that nobody has waited for."""
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
