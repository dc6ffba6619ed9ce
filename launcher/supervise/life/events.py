"""What happens to a run: the events that the machine of its life takes (machine.py).

A rank sends its own over a pipe (ranks/rank_events.py), other hosts theirs over the hub; the hands
of the driver send what they see: processes, signals, timers, files.  Time comes as `TimeIsUp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrun.launcher.ranks.rank_events import ENDS, Reason
from flowrun.launcher.ranks.wire import Notice

# timers
GRACE = "grace"  # launch.grace_s after a request to end
ANSWER = "answer"  # for other hosts to offer a step
LINGER = "linger"  # for ranks that lost a peer to say so
BACK_OFF = "back off"  # before ranks are started again

ROLLED_BACK = "rolled back"  # the source of a place after a rollback


@dataclass(frozen=True)
class StartPoint:
    """Where ranks begin.

    step: steps done or left out.  source: checkpoint, snapshot, beginning or ROLLED_BACK.  saved:
    steps of the checkpoint on the disk that it is; 0: none.  weights: of a rollback, steps of their
    checkpoint; 0: those of the beginning.
    """

    step: int = 0
    source: str = "beginning"
    saved: int = 0
    weights: int = 0


class RankDied(Notice):
    """A process of this host has ended badly.  how: with which status, or by which signal."""

    rank: int
    how: str


class RanksGone(Notice):
    """All processes of this host have ended, and all that they sent was taken."""


class HangSeen(Notice):
    """No rank of this host goes on; fault names who owes what."""

    fault: Reason


class Frozen(Notice):
    """No rank begins a step until the gate opens.  begun: the most steps that one has begun."""

    begun: int


@dataclass(frozen=True, kw_only=True)
class Company:
    """The hosts of a round.

    number, names: of this one and of all; no names: it is alone.  doors: where others come to each.
    sees: which of them see the folder of the first.  epoch: of the hub that numbered them; a host
    that takes the place of the first has a later one.
    """

    number: int = 0
    names: tuple[str, ...] = ()
    doors: tuple[str, ...] = ()
    sees: tuple[bool, ...] = ()
    epoch: int = 0

    @property
    def others(self) -> int:
        return max(0, len(self.names) - 1)

    @property
    def shared(self) -> bool:
        """True if this host sees the folder of the first, which is another."""
        return self.number > 0 and self.sees[self.number]

    def name(self, number: int) -> str:
        """Name a host for a person."""
        return f"host {number} ({self.names[number]})" if self.names else "this host"


class Met(Notice):
    """All hosts of a round are here.  port: of the ranks' store, on the hub's host."""

    company: Company
    port: int


class PlanWanted(Notice):
    """Another number of hosts is here, or another state, than this one has planned for.

    door: of a host that has the checkpoint of `step`, where this one does not see it.
    """

    num_hosts: int
    step: int
    door: str = ""


class Finished(Notice):
    """The first host has written all files of the complete run."""


class AlreadyComplete(Notice):
    """Other hosts have ended the run while this one waited to join them."""


class FromHost(Notice):
    """An event of another host."""

    host: int
    event: Notice


class HostGone(Notice):
    """A host has gone without having parted."""

    host: int
    why: str


class HaltOffered(Notice):
    """A host offers a step to halt after.

    round: of the agreement.  by, ends: see Asked.  begun: steps that one of its ranks has begun.
    """

    round: int
    by: str
    begun: int
    ends: int


class CheckpointKept(Notice):
    """The first host has completed the checkpoint of a step."""

    step: int


class Parted(Notice):
    """All hosts have sent all that they had to, or are awaited no longer."""


class Asked(Notice):
    """The run is asked for something.

    by: a signal, Ctrl-C, launch.time_limit, a callback or a host.  ends: how the run is to end:
    ENDS, or COMPLETES as a callback asks; 0: it saves and continues.  again: at once, as it was
    asked before, or by SIGQUIT or SIGHUP.  regroups: ranks end, and the hosts that are here meet.
    round: of the agreement that it belongs to; -1: the next.
    """

    by: str
    ends: int = ENDS
    again: bool = False
    regroups: bool = False
    round: int = -1


class TimeIsUp(Notice):
    """A timer that the machine has set is over."""

    timer: str


class StartFound(Notice):
    """The newest whole state was found."""

    place: StartPoint


class NewPlan(Notice):
    """There is a plan for the ranks that are left, or the hosts that are here.

    num_ranks: of it.  place: where they begin.
    """

    num_ranks: int
    place: StartPoint


class LauncherFailed(Notice):
    """This launcher cannot continue: a file that it cannot write, a callback that failed or hangs,
    hosts that do not meet, no plan for those that are left, another first host.

    refused: it never can, as the recipe or a key is wrong.
    """

    fault: Reason
    refused: bool = False
