"""Preemption: a run that is asked to end, or to save, does so after the step under way.

Requests handles signals and watches launch.time_limit; until ranks run there is nothing to save,
and what asks to end does so at once.  Preemption, in a thread of the launcher, halts the ranks by
their gate (step_gate.py); the launchers of several hosts agree on the step through their store.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from flowrun.engine.errors import RunError
from flowrun.launcher.launch.hosts.alone import Alone
from flowrun.launcher.launch.hosts.hosts import Hosts
from flowrun.launcher.launch.step_gate import COMPLETES, ENDS, StepGate
from flowrun.launcher.recipe.schema import Launch, time_limit_s
from flowrun.launcher.terminal.doing import clear

TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h: the same again may go well
TIME_LIMIT, CTRL_C, WARNING = "launch.time_limit", "Ctrl-C", "SIGUSR2"
NUMBERS = "numbers that are not finite"
_TWICE_S = 1.0  # timeout(1) and some schedulers signal a process and its group: that is once
_LOOK_S = 0.02  # from one look to the next whether the ranks have gone on from a halt


@dataclass(frozen=True)
class Request:
    """A request to a run.

    by: a signal's name, Ctrl-C or launch.time_limit.  ends: the run is to end; else it saves and
    goes on.  round: of the agreement with other hosts that it belongs to; None: the next.
    regroups: the ranks end, and this host meets those that are there.  completes: a callback ends
    the run, which is then complete.  By NUMBERS nothing is saved: where the ranks rest they find
    the op, and end with the error.
    """

    by: str
    ends: bool
    round: int | None = None
    regroups: bool = False
    completes: bool = False

    @property
    def end(self) -> int:
        """How the run ends, for a StepGate; 0: it goes on."""
        return COMPLETES if self.completes else ENDS if self.ends else 0

    @property
    def saves(self) -> bool:
        """True if a checkpoint is written at the halt."""
        return self.by != NUMBERS

    def __str__(self) -> str:
        if self.regroups:
            return f"{self.by}: the step under way is finished and saved, and the hosts meet again"
        if self.completes:
            return f"{self.by} ends the run after the step under way"
        if not self.ends:
            return f"{self.by}: a checkpoint is written after the step under way"
        if self.by == TIME_LIMIT:
            return f"{self.by} is reached: the step under way is finished and saved"
        return f"{self.by}: the step under way is finished and saved; a second one ends at once"


_OF_ONE_HOST = ("SIGTERM", WARNING, CTRL_C, TIME_LIMIT)
SIGNALS = {
    signal.SIGTERM: Request("SIGTERM", ends=True),
    signal.SIGUSR2: Request(WARNING, ends=True),  # Slurm's, as submitit asks for it
    signal.SIGINT: Request(CTRL_C, ends=True),
    signal.SIGUSR1: Request("SIGUSR1", ends=False),
}


class Preempted(SystemExit):
    """The end of a run that was asked to end and has lost nothing: exit status 75."""

    def __init__(self, by: str) -> None:
        super().__init__(TEMPORARY_FAILURE)
        self.by = by


class Regroup(RunError):
    """The ranks have saved all and have ended: the hosts that are there now meet and go on."""


def end_of(request: Request) -> BaseException:
    """Return what a run ends with that has saved all, or has nothing to save."""
    if request.regroups:
        return Regroup("the hosts", f"{request.by}.")
    return KeyboardInterrupt() if request.by == CTRL_C else Preempted(request.by)


def early_end_of(request: Request) -> BaseException:
    """Return what a run ends with whose last steps are lost."""
    if request.by == CTRL_C:
        return KeyboardInterrupt()
    if request.regroups:
        return RunError("the hosts", f"{request.by}.")
    return RunError("the launcher", f"stopped by {request.by}.")


class Requests:
    """The requests to this process while it trains.

    queue: requests that ranks can be halted for.  running: ranks run, and someone reads the queue.
    at_once: ends them without a halt, when a signal comes again; it is called in the main thread,
    between two lines of whatever runs there.
    """

    def __init__(self, launch: Launch) -> None:
        limit = time_limit_s(launch)
        self.deadline = None if limit is None else time.monotonic() + limit
        self.queue: SimpleQueue[Request | None] = SimpleQueue()
        self.running = False
        self.at_once: Callable[[Request], None] = _raise_early_end
        self._process = os.getpid()
        self._first: dict[int, float] = {}  # signal -> when it came first

    def complete(self, by: str) -> None:
        """End the run, which is then complete, for the callback of this name."""
        self.queue.put(Request(f"callback {by}", ends=True, completes=True))

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle signals, but for those that are ignored (nohup) or that another has use for."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        others = {signal.SIGUSR1: (signal.SIG_DFL,)}
        for number, handler in before.items():
            if handler in others.get(number, (handler,)) and handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        request = SIGNALS[signal.Signals(number)]
        if os.getpid() != self._process:
            return  # one just forked; its launcher ends it
        if not self.running:
            if request.ends:
                self.queue.put(request)  # the error may be lost in a callback of C code
                clear()
                raise end_of(request)
            return
        now = time.monotonic()
        first = self._first.setdefault(number, now)
        if first == now or not request.ends:
            self.queue.put(request)
        elif now - first >= _TWICE_S:
            self.at_once(request)


def _raise_early_end(request: Request) -> None:
    raise early_end_of(request)


class Offer(NamedTuple):
    """The steps that some rank of a host has begun, how the host is asked to end (ENDS, COMPLETES,
    0: it is not), and whether it sees the folder where the first host saves.
    """

    begun: int
    ends: int
    sees: bool


@dataclass(kw_only=True)
class Preemption:
    """Halts the ranks of this host when that is asked.

    gate: of these ranks.  requests: what is asked.  saved: steps of the checkpoint that the ranks
    begin at.  steps: of the whole training.  grace_s: from a request to end to the end.  say: shows
    a line to a person.  stop: ends the ranks at once.
    hosts: this launcher among the others.
    ending: the request that the run ends for.  halt: the step after which it does.  completes: it
    is complete then.
    early: what it ends with if it is not left the time to do so.
    """

    gate: StepGate
    requests: Requests
    saved: int
    steps: int
    grace_s: float
    say: Callable[[str], None]
    stop: Callable[[], None]
    hosts: Hosts | Alone
    ending: Request | None = None
    halt: int | None = None
    completes: bool = False
    early: BaseException | None = None
    _until: float | None = None
    _round: int = 0
    _offers: dict[int, dict[int, Offer]] = field(default_factory=dict)  # of each round, by host
    _offered: threading.Condition = field(default_factory=threading.Condition)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve requests in a thread while ranks run."""
        server = threading.Thread(target=self._serve, daemon=True)
        self._until = self.requests.deadline
        self.requests.at_once, self.requests.running = self._end_at_once, True
        server.start()
        try:
            yield
        finally:
            self.requests.at_once = _raise_early_end
            self._over.set()
            with self._offered:
                self._offered.notify()
            self.requests.queue.put(None)
            server.join(timeout=5)

    def end_after(self, ended: BaseException | None) -> BaseException | None:
        """Return what the run ends with if it has saved all; None if it was not asked to end.

        ended: what ended its ranks early, or None.
        """
        if self.early or self.ending is None or self.halt is None or self.completes:
            return None
        nothing_begun = self.halt == self.saved
        return end_of(self.ending) if ended is None or nothing_begun else None

    def receive(self, host: int, number: int, by: str, offer: Offer) -> None:
        """Take what another host offers for a round, and join in it.

        host, number: of the host and of the round.  by: what was asked there.  offer: its own.
        """
        with self._offered:
            self._offers.setdefault(number, {})[host] = offer
            self._offered.notify()
        regroups = offer.ends == ENDS and self.hosts.may_change and by != NUMBERS
        if regroups and by in _OF_ONE_HOST:
            by = f"{self.hosts.name(host)} leaves ({by})"
        completes = offer.ends == COMPLETES
        self.requests.queue.put(Request(by, offer.ends > 0, number, regroups, completes))

    def make_room(self, name: str) -> None:
        """Halt the ranks of all hosts, as another host, `name`, waits to join them."""
        self.requests.queue.put(Request(f"a host joins ({name})", ends=True, regroups=True))

    def halt_for_numbers(self) -> None:
        """Halt the ranks of all hosts, as a step has gone wrong: they find out where."""
        self.requests.queue.put(Request(NUMBERS, ends=True))

    def _serve(self) -> None:
        while not self._over.is_set():
            left = None if self._until is None else max(0.0, self._until - time.monotonic())
            try:
                request = self.requests.queue.get(timeout=left)
            except Empty:
                if self.ending is not None:
                    self._end_late()
                    return
                request = Request(TIME_LIMIT, ends=True)
            if request is None:
                continue
            if self.ending is None:
                self._take(request)
            elif request.by == WARNING or (self.ending.regroups and not request.regroups):
                self.ending = request  # a job is put back into the queue; this host leaves, too

    def _take(self, request: Request) -> None:
        if request.round is not None and request.round < self._round:
            return  # what another host asked for in a round that is over
        if request.saves:
            if request.ends:
                self.ending, self._until = request, time.monotonic() + self.grace_s
            self.say(str(request))
        while not self.gate.is_clear:
            if self._over.wait(_LOOK_S):
                return
        if self.gate.freeze():
            self._halt(request)

    def _halt(self, request: Request) -> None:
        """Halt the ranks, which are frozen, after the steps that some rank of any host has
        begun.
        """
        sees = self.hosts.number == 0 or self.hosts.shared
        offers = self._agree(Offer(self.gate.begun, request.end, sees), request.by)
        if offers is None:
            self.gate.open()
            if self.early is None:
                self._end_early(RunError("another host", f"it did not answer to {request.by}."))
            return
        if not request.saves:
            self.gate.open(max(offer.begun for offer in offers), ends=True)
            return
        if not all(offer.sees for offer in offers):
            self.gate.open()
            self.say(f"{request.by}: nothing is saved, as the hosts do not share the run's folder")
            if request.ends and request.round is None:
                self._end_early(early_end_of(request))
            return
        halt, ends = max(offer.begun for offer in offers), max(offer.ends for offer in offers)
        if halt >= self.steps:
            self.gate.open()
            self.say(f"{request.by}: the last step has begun, and the run ends with it")
            return
        if ends:
            self.ending, self.halt = self.ending or request, halt
            self.completes = ends == COMPLETES
            self._until = self._until if request.ends else time.monotonic() + self.grace_s
        self.gate.open(halt, ends)
        if ends and halt == self.saved:  # nothing has begun
            self._until = None
            self.stop()

    def _agree(self, mine: Offer, by: str) -> list[Offer] | None:
        """Return what all hosts offer for this round; None if one offers nothing in time.

        mine: of this host.  by: what is asked.
        """
        number, others = self._round, len(self.hosts.names) - 1
        self._round += 1
        self.hosts.broadcast("halt", number, by, *mine)
        with self._offered:
            offered = self._offers.setdefault(number, {})
            done = self._offered.wait_for(
                lambda: len(offered) >= others or self._over.is_set(), self.grace_s
            )
            return [mine, *offered.values()] if done and len(offered) >= others else None

    def _end_at_once(self, request: Request) -> None:
        self._end_early(self.early or early_end_of(request))

    def _end_early(self, error: BaseException) -> None:
        self.early = error
        self.stop()

    def _end_late(self) -> None:
        problem = f"the step under way was not finished and saved within {self.grace_s:g} s."
        self._end_early(RunError("launch.grace_s", problem))
