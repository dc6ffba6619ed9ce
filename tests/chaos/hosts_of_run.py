"""The processes of a run under chaos: start them, strike them, see what they leave behind."""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from chaos.blows import HOST, LAUNCHER, LINK, RUN, STOP, TWICE_S, WORKER, Blow, Strike
from chaos.verdicts import Ended
from support.runs.linked_hosts import LinkedHosts
from support.runs.warm_start import start

_POLL_S = 0.01
_GONE_S = 10  # until a process that was killed is gone


class RunHost:
    """A host of a run: a launcher and its workers, in a session of their own."""

    def __init__(self, place: Path, name: str, words: Sequence[str], namespace: str = "") -> None:
        """Start the launcher.

        place: working directory.  name: of its output.  words: of the command line.  namespace: of
        its network, if that is its own.
        """
        self.log = place / f"{name}.txt"
        (place / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, "COLUMNS": "160", "TMPDIR": str(place / "tmp")}
        environment.pop("OMP_NUM_THREADS", None)
        with self.log.open("wb") as log:
            out = log.fileno()
            self.process = start(place, words, environment, out, out, namespace)
        self.struck = False
        self._status: int | None = None

    def poll(self) -> int | None:
        """How the launcher ended; None if it runs."""
        if self._status is None and not _runs(self.process.pid):
            self._status = self.process.wait()
        return self._status

    def workers(self) -> list[int]:
        """Process ids of its children that run, by rank."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sorted(child.pid for child in psutil.Process(self.process.pid).children())
        return []

    def everything(self) -> list[int]:
        """Process ids of the launcher and its workers."""
        return [self.process.pid, *self.workers()]

    def ended(self) -> Ended:
        printed = self.log.read_text(errors="replace")
        return Ended(status=self.poll(), printed=printed, struck=self.struck)


class StruckRun:
    """A run of one host or of several, in one folder."""

    def __init__(
        self,
        place: Path,
        name: str,
        words: Sequence[Sequence[str]],
        linked: LinkedHosts | None = None,
    ) -> None:
        """Start the launchers.

        place: working directory.  name: begins the names of the files of its output.  words: of the
        command line of each host.  linked: their networks, if each has its own.
        """
        self.linked = linked
        networks = linked.namespaces if linked else [""] * len(words)
        self.hosts = [
            RunHost(place, f"{name}{host}", each, networks[host]) for host, each in enumerate(words)
        ]

    @property
    def struck(self) -> list[RunHost]:
        return [host for host in self.hosts if host.struck]

    def is_over(self, but: Collection[RunHost] = ()) -> bool:
        """True if the launchers of all hosts have ended.  but: of all others than these."""
        return all(host.poll() is not None for host in self.hosts if host not in but)

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

    def wait_for_steps(self, metrics: Path, steps: int) -> None:
        """Wait until so many steps are done, as metrics.jsonl says, or the run is over."""
        while not self.is_over():
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
                return
            time.sleep(_POLL_S)

    def strike(self, strike: Strike) -> None:
        """Send the signal of a blow to the processes that it hits, or cut the link."""
        blow, host = strike.blow, self.hosts[strike.host]
        if blow.target == LINK:
            assert self.linked
            self.linked.cut(strike.host)
            return
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

    def follow(self, blow: Blow) -> None:
        """Do what follows a blow: a host that was stopped wakes once the others have ended, a link
        is mended, or those that it has parted are asked to end.
        """
        if blow.number == STOP and self.struck:
            self.wait(blow.within_s, but=self.struck)
            self.wake()
        elif blow.back_s is not None and self.linked:
            self.wait(blow.back_s)
            self.linked.mend()
        elif blow.target == LINK and blow.number:
            for _ in range(2):
                self.wait(TWICE_S)
                for host in self.hosts:
                    if host.poll() is None:
                        _send(host.process.pid, blow.number)

    def wake(self) -> None:
        """Let a host that was stopped go on, for its run is over elsewhere."""
        for host in self.hosts:
            if host.struck:
                for pid in host.everything():
                    _send(pid, signal.SIGCONT)

    def left(self) -> list[int]:
        """Process ids of what still runs of it."""
        sessions = {host.process.pid for host in self.hosts}
        return [pid for pid in psutil.pids() if _session(pid) in sessions and _runs(pid)]

    def kill(self) -> None:
        for pid in self.left():
            _send(pid, signal.SIGKILL)
        self.wait(_GONE_S)
        if self.linked:
            self.linked.close()


def _session(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0


def _runs(pid: int) -> bool:
    """False for a process that has ended, also if nobody has waited for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
