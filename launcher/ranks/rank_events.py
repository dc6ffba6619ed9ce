"""The events that a rank sends to its launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrun.launcher.ranks.wire import Notice

# at a halt the run ends, and may go on later; it is complete
ENDS, COMPLETES = 1, 2

# how ranks come to an end
DIED = "died"  # a process was killed, or lost another: it may do better the next time
RAISED = "raised"  # its code raised an error
LEFT = "left"  # a host has gone
CANCELLED = "cancelled"  # somebody wants the run to end, or its launcher is broken


@dataclass(frozen=True)
class Reason:
    """What went wrong.  where, problem, instead: as of a RunError.  story: a traceback, or ""."""

    where: str
    problem: str
    instead: str = ""
    story: str = ""


class StepDone(Notice):
    """A step has ended.  results: by name.  seconds: since the last.  gauges: of a host, by tag."""

    step: int
    results: Mapping[str, object]
    seconds: float
    gauges: Mapping[str, float]


class Evaluated(Notice):
    """An evaluation has ended, with the weights after `step`."""

    step: int
    results: Mapping[str, object]


class FileWritten(Notice):
    """A rank has written its file `name` of a checkpoint.  written: its bytes and checksum."""

    step: int
    name: str
    written: tuple[int, int]


class Remarked(Notice):
    """A rank or a host says what a person should know.  waits: it is about what takes time."""

    text: str
    waits: bool = False


class WeightsWritten(Notice):
    """A rank of one of several hosts has written its part of the weights to a file `name`."""

    rank: int
    name: str


class RankEnded(Notice):
    """A rank has ended well.  measured: for the report."""

    rank: int
    measured: Mapping[str, object]


class NumbersSeen(Notice):
    """A rank has seen numbers that are not finite: all are to rest, and find out where."""


class Failure(Notice):
    """Ranks end early: a rank says so of itself, or a launcher of the ranks of its host.

    how: DIED, LEFT or RAISED.  lost_peer: the fault is another rank's.  host: the number of the
    host that sent it; -1: this.  bad: steps begun by the end of the one whose numbers are not
    finite; 0: no such.
    """

    fault: Reason
    how: str = RAISED
    lost_peer: bool = False
    host: int = -1
    bad: int = 0
