"""What the launcher collects from its ranks and from other hosts, and whom it blames at the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from flowrun.engine.errors import RunError
from flowrun.engine.trace.trace import TraceEvent
from flowrun.launcher.launch.elastic import STOP
from flowrun.launcher.launch.events import concerns_all
from flowrun.launcher.launch.hosts.alone import Alone
from flowrun.launcher.launch.hosts.hosts import Hosts
from flowrun.launcher.launch.preemption import Offer, Preemption
from flowrun.launcher.launch.restart.restarts import Ending
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import Log

_PATIENCE_S = 2.0  # after a rank failed, what elastic does not notice is ended
_PART_S = 1.0  # for the other hosts to end after a failure, before the ranks' store closes


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of a rank, a launcher or a host.

    lost_peer: the rank merely lost another.  host: the number of the host that sent it; None: this.
    ending: how it ends the ranks.
    """

    error: RunError
    lost_peer: bool = False
    host: int | None = None
    ending: Ending = Ending.RAISED


@dataclass(kw_only=True)
class EventCollector:
    """Collects the events of workers and of other hosts, in threads of the launcher.

    files: of each checkpoint that is being written, those that are on the disk.
    hosts: this launcher among the others.  preemption: takes what they offer.  votes: what they say
    of copies (restart/aims.py).
    not_finite: steps begun by the end of the one whose numbers ended the ranks; None: no such.
    broken: what went wrong here, while writing it down.  hung: why the ranks were killed as they
    hung.  running: elastic is in charge.  over: it no longer is.  stopped_us: an event has ended
    the run.
    """

    record: Record
    hosts: Hosts | Alone
    preemption: Preemption | None = None
    votes: SimpleQueue[tuple[int, tuple[Any, ...]]] = field(default_factory=SimpleQueue)
    failures: list[Failure] = field(default_factory=list)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    here: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: dict[int, dict[str, Sequence[int]]] = field(default_factory=dict)
    not_finite: int | None = None
    broken: RunError | None = None
    hung: RunError | None = None
    running: bool = False
    over: bool = False
    stopped_us: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    taking: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, readers: Sequence[Connection]) -> None:
        """Read events until every pipe has ended, also that of a worker killed in mid-message."""
        open_pipes = list(readers)
        while open_pipes:
            ready: list[Any] = wait(open_pipes)
            for pipe in ready:
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    open_pipes.remove(pipe)
                    continue
                if concerns_all(message):
                    self.hosts.broadcast(*message)
                self._take(message, None)

    def receive(self, host: int, message: tuple[Any, ...]) -> None:
        """Take an event of another host."""
        self._take(message, host)

    def _take(self, message: tuple[Any, ...], host: int | None) -> None:
        if self.broken is not None:
            return  # the pipes are still emptied: no worker must block
        try:
            with self.taking:
                self._note(message, host)
        except Exception as error:
            self.broken = _launcher_error(error)
            self.stop_us()

    def _note(self, message: tuple[Any, ...], host: int | None) -> None:
        match message:
            case ("step", step, results, seconds, gauges):
                self.record.step(step, results, seconds, gauges)
            case ("evaluated", step, results):
                self.record.write_evaluation(step, results)
            case ("saved", folder, step, name, written):
                if self.hosts.number == 0:
                    self._take_file(Path(folder), step, name, written)
            case ("note", text):
                self.record.note(text)
            case ("end", rank, measured):
                self.ends[rank] = measured
            case ("weights", rank, seen):
                self.here[rank] = seen
            case ("halts",) if self.preemption:
                self.preemption.halt_for_numbers()
            case ("not_finite", steps):
                self.not_finite = steps
            case ("error", where, problem, story, lost_peer):
                error = RunError(where, problem)
                error.add_note(story)
                self._fail(Failure(error=error, lost_peer=lost_peer, host=host))
            case ("died", where, problem):
                self._fail(Failure(error=RunError(where, problem), host=host, ending=Ending.DIED))
            case ("left", where, problem):
                self._fail(Failure(error=RunError(where, problem), host=host, ending=Ending.LEFT))
            case ("gone", name, why):
                error = RunError(f"host {host} ({name})", why)
                self._fail(Failure(error=error, host=host, ending=Ending.LEFT))
            case ("halt", number, by, *offer) if self.preemption and host is not None:
                self.preemption.receive(host, number, by, Offer(*offer))
            case ("joining", name) if self.preemption:
                self.preemption.make_room(name)
            case ("copied" | "missed" | "aim", *_) if host is not None:
                self.votes.put((host, message))
            case ("kept", step):
                self.record.add_checkpoint(step)
            case ("silent", name, seconds):
                self.record.say(f"nothing came from host {host} ({name}) for {seconds:.0f} s")

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if failure.host is not None:
            self.stop_us()
        elif not failure.lost_peer:  # elastic sees it at once: it is a rank of this host
            threading.Timer(_PATIENCE_S, self.stop_us).start()

    def _take_file(self, folder: Path, step: int, name: str, written: Sequence[int]) -> None:
        """Note that a rank has written its file of a checkpoint; complete it with the last."""
        files = self.files.setdefault(step, {})
        files[name] = written
        if len(files) == self.record.job.recipe.num_ranks:
            self.record.complete_checkpoint(folder, step, self.files.pop(step))
            self.hosts.broadcast("kept", step)

    def note_hang(self, error: RunError) -> None:
        """Note why ranks are killed that hang."""
        self.hung = error

    @contextmanager
    def may_stop_us(self) -> Iterator[None]:
        """Let an event end the run while elastic is in charge."""
        self.running = True
        try:
            yield
        finally:
            with self.lock:
                self.running, self.over = False, True

    def stop_us(self) -> None:
        """End the run as soon as elastic is there to do so: it ends the workers, then itself.

        A signal's handler may call it, while this thread holds the lock.
        """
        if not self.lock.acquire(timeout=1.0):
            return
        try:
            if self.stopped_us:
                return  # a second signal would come in the midst of what follows the first
            if self.running and signal.getsignal(STOP) is not signal.SIG_DFL:
                self.stopped_us = True
                os.kill(os.getpid(), STOP)
            elif not self.over:
                again = threading.Timer(0.1, self.stop_us)
                again.daemon = True
                again.start()
        finally:
            self.lock.release()

    def part(
        self, ended: BaseException | None, agreed: BaseException | None = None
    ) -> BaseException | None:
        """Part from the other hosts; return the error that ended the run, None if it ended well.

        ended: Ctrl-C, or what elastic saw first.  agreed: what all hosts end with, as one was asked
        to end.
        """
        if agreed is not None and self.broken is None:
            self.hosts.part(_PART_S if ended else None)
            return agreed
        verdict = self.verdict(ended)
        if verdict is None:
            self.hosts.part()  # with all their events
            all_ended = len(self.ends) == self.record.job.recipe.num_ranks
            return None if all_ended else self.verdict(None)
        self._notify_other_hosts(verdict)
        self.hosts.part(_PART_S)
        return self._name_host(verdict)

    def verdict(self, ended: BaseException | None) -> BaseException | None:
        """Return the error that ended the run; None if it ended well.

        What failed by itself, on any host, comes before a rank that elastic saw die, and both
        before those that only lost a peer.  ended: Ctrl-C, or what elastic saw first.
        """
        if self.broken or isinstance(ended, KeyboardInterrupt):
            return self.broken or ended
        own = [failure.error for failure in self.failures if not failure.lost_peer]
        if ended is None:
            return own[0] if own else None
        assert isinstance(ended, RunError)
        known = {f.error.where.split(",")[0] for f in self.failures if f.host is None}
        died = [ended] if ended.where.startswith("rank") and ended.where not in known else []
        victims = [failure.error for failure in self.failures]
        return self.hung or [*own, *died, *victims, ended][0]

    def ending(self, ended: BaseException | None, error: BaseException) -> Ending:
        """Say why the ranks have ended.

        ended: Ctrl-C, or what elastic saw first.  error: the verdict.
        """
        signalled = isinstance(ended, RunError) and ended.where.endswith("the launcher")
        if (
            self.broken
            or isinstance(ended, KeyboardInterrupt)
            or (signalled and not self.stopped_us)
        ):
            return Ending.STOPPED
        failure = self._find(error)
        return Ending.DIED if failure is None or failure.lost_peer else failure.ending

    def _notify_other_hosts(self, error: BaseException) -> None:
        """Notify them, unless it is known there."""
        failure = self._find(error)
        if failure is not None and not failure.lost_peer:
            return
        if not isinstance(error, RunError):
            self.hosts.broadcast("left", "the launcher", "stopped by Ctrl-C.")
        elif failure is not None:
            self.hosts.broadcast("error", error.where, error.problem, "", True)
        else:
            kind = "died" if error.where.startswith("rank") else "left"
            self.hosts.broadcast(kind, error.where, error.problem)

    def _name_host(self, error: BaseException) -> BaseException:
        """Return the error with the host where it happened."""
        failure = self._find(error)
        if not self.hosts.names or not isinstance(error, RunError):
            return error
        if error.where.startswith("host"):
            return error
        host = self.hosts.number if failure is None or failure.host is None else failure.host
        error.where = f"{self.hosts.name(host)}, {error.where}"
        return error

    def _find(self, error: BaseException) -> Failure | None:
        return next((failure for failure in self.failures if failure.error is error), None)

    def log(self) -> Log:
        """Everything measured on all ranks."""
        ends = dict(sorted(self.ends.items()))

        def by_rank(key: str) -> dict[int, Any]:
            return {rank: measured[key] for rank, measured in ends.items()}

        record = self.record
        return Log(
            record.steps,
            record.validation,
            peak_bytes=by_rank("peak"),
            sent_bytes=by_rank("sent"),
            acts=by_rank("acts"),
            most_stashed=by_rank("stashed"),
            process_bytes=by_rank("process_peak"),
            waited_s=by_rank("waited_s"),
            notes={
                rank: [TraceEvent(*note) for note in notes]
                for rank, notes in by_rank("notes").items()
                if notes
            },
            restarts=record.restarts,
            measured_steps=record.reached - record.first,
        )


def _launcher_error(error: Exception) -> RunError:
    """Return the error that ends a run because the launcher cannot write it down."""
    if isinstance(error, RunError):
        return error
    found = RunError("the launcher", f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found
