"""The watch: a thread of the launcher that notices when nothing goes on, and says who owes what.

It looks at the counts of this host's ranks (pulse.py), several times in `launch.hang_s`.  Outside
ordinary steps (ranks that meet, a first step, a checkpoint) it allows more time, as long as ranks
read, write or compute.  When a run hangs, its ranks are killed, and it ends as if one had died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrun.engine.actors.standstill import ABSENT, RankState, Standstill, describe_owed, find_owed
from flowrun.engine.errors import TRACEBACK
from flowrun.engine.runtime.drivers.pulse import STEPS, Activity, Pulse, Pulses
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.engine.runtime.process.vital_signs import describe_halt, measure_work
from flowrun.engine.trace.stragglers import find_straggler
from flowrun.launcher.job.faults import own_fault
from flowrun.launcher.ranks.rank_events import Reason

FILE = "hang.txt"
HANG_S, HANG_STEPS = 60.0, 20  # launch.hang_s: null is the longer of both
_LOOKS = 8  # in hang_s; one a second at least
_GROWTH = 3
_LONGEST_S = 1800.0  # of quiet outside ordinary steps, while ranks compute
_MARGIN_S = 60.0
_NEVER_S = 7 * 86400.0  # the longest timeout that libraries take
_SHARE = 0.05  # of a core in hang_s: a process that uses more works
_STARVES = 0.5  # of hang_s: so does one that waits for a core for longer (rank_saves.py: _NICE)
_SAY_S = 5.0  # after which it is said which ranks are missing at the start
_OTHER_HOST_S = 5.0  # for the host of the rank that owes: it knows more
_WINDOW_S, _WINDOWS, _WINDOW_STEPS = 10.0, 3, 5  # a straggler is one in 3 windows in a row
_INSIDE, _INNERMOST = "torch/distributed/", 6  # part of a file's path; calls of a stack
_GONE_S = 10.0  # after which processes that were killed should have ended


def find_limit(hang_s: float | None, step_s: float) -> float:
    """Return the seconds after which a run hangs, at first; 0: never.

    hang_s: the recipe's.  step_s: foreseen seconds of a step.
    """
    return max(HANG_S, HANG_STEPS * step_s) if hang_s is None else hang_s


def find_silence(limit_s: float) -> float:
    """Return the seconds after which gloo and NCCL give a message up: later than find_limit's, so
    that the watch of a host, which can name the rank, comes first.
    """
    return max(limit_s, _LONGEST_S) + _MARGIN_S if limit_s else _NEVER_S


class Quiet:
    """A clock of how long nothing has gone on.

    A look counts for no more than twice the time between looks: if the launcher has been stopped
    itself (Ctrl-Z), so most likely were its ranks.
    """

    def __init__(self, limit_s: float, between_s: float, grows: bool = False) -> None:
        """limit_s, between_s: seconds until the run hangs, and between looks.

        grows: the limit becomes 3 times the longest that something has taken.
        """
        self.limit_s, self.between_s, self.grows = limit_s, between_s, grows
        self.acts_s = self.work_s = 0.0  # without an act; without an act or work
        self._acts: object = None
        self._acted = self._now = self._looked = 0.0
        self._works: deque[tuple[float, Sequence[float]]] = deque()  # (when, work), newest last

    def look(self, acts: object, work: Sequence[float], now: float) -> bool:
        """Look once; True if the run hangs.

        acts: changes with every act.  work: grows while processes compute, where acts may take
        long; less than one in all of the limit is none.  now: seconds of any clock.
        """
        self._now += min(now - self._looked, 2 * self.between_s)
        self._looked = now
        if acts != self._acts:
            if self.grows:
                self.limit_s = max(self.limit_s, _GROWTH * self.acts_s)
            self._acts, self._acted = acts, self._now
            self._works.clear()
        self._works.append((self._now, work))
        while any(b - a >= 1 for a, b in zip(self._works[0][1], work, strict=True)):
            self._works.popleft()
        self.acts_s, self.work_s = self._now - self._acted, self._now - self._works[0][0]
        return self.work_s >= self.limit_s or self.acts_s >= max(self.limit_s, _LONGEST_S)


class Pace:
    """Compares the paces of ranks, window by window, until one straggler has been found."""

    def __init__(self, pulses: Sequence[Pulse]) -> None:
        self._pulses = pulses
        self._before: tuple[float, float, dict[int, float]] | None = None
        self._slow: list[int] = []  # the straggler of each window so far
        self._said = False

    def look(self, now: float) -> str:
        """Look at the time `now` in seconds; return what to say of a straggler, once."""
        if self._said or any(pulse.activity != Activity.TRAINING for pulse in self._pulses):
            self._before = None
            return ""
        steps = min(pulse.trained_steps for pulse in self._pulses)
        waited_s = {pulse.rank: pulse.waited_s for pulse in self._pulses}
        since, steps_before, before = self._before = self._before or (now, steps, waited_s)
        done = steps - steps_before
        if now - since < _WINDOW_S or done < _WINDOW_STEPS:
            return ""
        self._before = now, steps, waited_s
        share = {rank: (waited_s[rank] - before[rank]) / done for rank in waited_s}
        found = find_straggler(self._pulses[0].plans[0], share, (now - since) / done)
        same = found and all(rank == found.rank for rank in self._slow)
        self._slow = [*(self._slow if same else ()), *([found.rank] if found else ())]
        self._said = len(self._slow) >= _WINDOWS
        return str(found) if self._said else ""


def explain_hang(
    ranks: Mapping[int, RankState], found: Standstill, quiet_s: float, host_of: Callable[[int], str]
) -> Reason:
    """Return why a run that hangs ends: it names the rank and its act.

    ranks: counts.  found: what they mean.  quiet_s: for how long nothing has gone on.
    """
    rank, actor, *_ = found.owed[0]
    plan = ranks[rank].plan if rank in ranks else None
    what = f", actor {plan.actors[actor].name}" if plan and actor is not None else ""
    owed = [describe_owed(each, ranks, host_of) for each in found.owed]
    first = f"nothing has gone on for {quiet_s:.0f} s: {owed[0]}"
    waits = [lines[0] for lines in found.waits.values()]
    return Reason(f"rank {rank}{what}", "\n".join([first, *owed[1:], *waits]))


@dataclass(kw_only=True, eq=False)
class Watch:
    """The watch over the ranks of this host.

    limit_s: as find_limit returns.  folder: where hang.txt goes.  fail: takes why a run ends that
    hangs.  compares: True to name stragglers: where loops do not run ahead of a device.  grows: see
    Quiet.  own: returns when that thread of the launcher itself last did something which has been
    quiet the longest, and its name.
    """

    pulses: Pulses
    stacks: Stacks
    limit_s: float
    folder: Callable[[], Path]
    say: Callable[[str], None]
    fail: Callable[[Reason], None]
    host_of: Callable[[int], str]
    compares: bool
    grows: bool
    own: Callable[[], tuple[float, str]] = lambda: (time.monotonic(), "")

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        if self.limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.limit_s:
            self._thread.join(timeout=5)
        self.stacks.close()

    def _run(self) -> None:
        """Watch until the run ends.  A fault of the watch ends no run, but it is said."""
        try:
            self._watch()
        except Exception as error:  # whatever it is: the run continues without a watch
            self.say(f"from here on no hang and no slow rank is named: {own_fault(error)}")
            if os.environ.get(TRACEBACK) == "1":
                raise

    def _watch(self) -> None:
        between_s = min(1.0, self.limit_s / _LOOKS)
        quiet, missing = Quiet(self.limit_s, between_s, self.grows), ""
        own = Quiet(self.limit_s, between_s)
        pace = Pace(self.pulses.ranks)
        while not self._ended.wait(between_s):
            since, name = self.own()
            own.limit_s = quiet.limit_s
            if own.look(since, (), time.monotonic()):
                self._end_launcher(own.acts_s, name)
            moved, computed = self._measure_work()
            hangs = quiet.look((self.pulses.copy(), moved), computed, time.monotonic())
            if not any(pulse.process for pulse in self.pulses.ranks):
                quiet = Quiet(self.limit_s, between_s, self.grows)
            elif hangs and self._end_run(quiet):
                return
            elif self.compares and (straggler := pace.look(time.monotonic())):
                self.say(straggler)
            elif quiet.work_s > _SAY_S and (found := self._find_missing()) != missing:
                missing = found
                self.say(f"{found}: the others wait.")

    def _end_launcher(self, quiet_s: float, name: str) -> None:
        """End a launcher one of whose threads blocks: it could not end its ranks, nor itself."""
        print(f"{name}\n  it has not gone on for {quiet_s:.0f} s.", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            (self.folder() / FILE).write_text("\n".join([name, *_own_stacks()]) + "\n")
        self._kill_ranks()
        os._exit(1)

    def _kill_ranks(self) -> None:
        for pulse in self.pulses.ranks:
            if pulse.process:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pulse.process, signal.SIGKILL)

    def _measure_work(self) -> tuple[list[int], list[float]]:
        """Return the data that ranks move, in 64 kB, and how they compute, or would on a machine
        with a core for them, in units of what makes a process that works; of ranks whose acts may
        take long.
        """
        works = [
            measure_work(pulse.process)
            for pulse in self.pulses.ranks
            if pulse.process and (pulse.activity not in STEPS or pulse.in_first_step)
        ]
        shares = [s for w in works for s in (w.cpu_s / _SHARE, w.starved_s / _STARVES)]
        return [work.num_bytes >> 16 for work in works], [share / self.limit_s for share in shares]

    def _find_missing(self) -> str:
        """Name the ranks that others wait for at the start."""
        activities = {pulse.rank: pulse.activity for pulse in self.pulses.ranks}
        first = min(activities.values())
        if first > Activity.MAKING_WEIGHTS:
            return ""
        late = ", ".join(str(rank) for rank, at in activities.items() if at == first)
        return f"rank {late} {first.text}"

    def _end_run(self, quiet: Quiet) -> bool:
        """End a run that hangs; False if it goes on after all."""
        before, pulses = self.pulses.copy(), self.pulses.ranks
        halts = [describe_halt(pulse.process) for pulse in pulses]
        ranks = {pulse.rank: pulse.state(halts[k]) for k, pulse in enumerate(pulses)}
        runs = [k for k, pulse in enumerate(pulses) if pulse.process and not halts[k]]
        asked = {k: pulses[k].process for k in runs}
        stacks = self.stacks.collect(asked)
        waiting = {pulses[k].rank for k, text in stacks.items() if waits_inside(text)}
        absent = set(range(pulses[0].plans[0].num_ranks)) - set(ranks)
        found = find_owed(ranks).without(waiting, absent)
        if found.owed[0].why == ABSENT and self._ended.wait(_OTHER_HOST_S):
            return True
        children = {k: self.stacks.collect_children(k, process) for k, process in asked.items()}
        if self.pulses.copy() != before:
            return False
        fault, file = explain_hang(ranks, found, quiet.acts_s, self.host_of), self.folder() / FILE
        self.fail(replace(fault, problem=f"{fault.problem}\nAll waits and stacks: {file}"))
        self._kill_ranks()
        with contextlib.suppress(OSError):
            title = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {fault.where}: {fault.problem}"
            file.write_text(f"{title}\n\n{describe_ranks(ranks, found, pulses, stacks, children)}")
        if not self._ended.wait(_GONE_S):  # a process that the kernel does not let go
            print(f"{fault.where}\n  {fault.problem}\n  It cannot be killed.", file=sys.stderr)
            os._exit(1)
        return True


def waits_inside(stacks: str) -> bool:
    """Return whether the main thread of a process waits for others inside of torch.distributed, as
    its stacks show.  The main thread comes last, its innermost call first.
    """
    main = stacks.rpartition("(most recent call first):")[2].splitlines()
    return any(_INSIDE in line for line in main[:_INNERMOST])


def describe_ranks(
    ranks: Mapping[int, RankState],
    found: Standstill,
    pulses: Sequence[Pulse],
    stacks: Mapping[int, str],
    children: Mapping[int, Mapping[int, str]],
) -> str:
    """Return the text of hang.txt below its title.

    ranks, found: see explain_hang.  stacks: by number in `pulses`.  children: the stacks of what a
    rank has forked, such as data workers, by that number and the process.
    """
    lines: list[str] = []
    for k, pulse in enumerate(pulses):
        rank, halted = pulse.rank, ranks[pulse.rank].halted
        lines += [
            f"rank {rank}, process {pulse.process}{f', {halted}' if halted else ''}: "
            f"{ranks[rank].activity}; its last act ended {pulse.quiet_s:.1f} s ago",
            *(f"  {line}" for line in found.waits.get(rank, ())),
            *_indent(stacks.get(k, "").splitlines()),
        ]
        for process, text in children.get(k, {}).items():
            lines += [f"  its child, process {process}", *_indent(text.splitlines())]
        lines.append("")
    return "\n".join([*lines, "the launcher", *_indent(_own_stacks())]) + "\n"


def _indent(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def _own_stacks() -> list[str]:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().splitlines()
