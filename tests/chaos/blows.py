"""Blows: a seed -> what happens to a run, to which of its processes, and when.

A run is of one host, of two hosts on loopback, or of two that a link joins.
"""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

ONE, TWO, LINKED = "one host", "two hosts", "two linked hosts"
WORKER, WORKERS, LAUNCHER, HOST, RUN = "worker", "workers", "launcher", "host", "run"
LINK = "link"
KILL, TERM, INT, SEGV, STOP = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGSEGV,
    signal.SIGSTOP,
)
PREEMPTED, INTERRUPTED = 75, 130
BOUND_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Blow:
    """A blow strikes some processes of a run with a signal, or cuts the link between two hosts.

    target: a worker, all workers of a host, a host's launcher, all processes of a host or of the
        run, or the link.
    number: the signal; once a link is cut, both launchers get it, and again; 0: none.
    statuses: with which the launchers that notice it may end; one that is killed has none, and 0
        stands for a run that goes on by itself.
    words: of the command line, beside those of each run.
    back_s: seconds after which a link that was cut is mended; None: never.
    within_s: seconds from the blow to the end of all launchers, unless the run goes on.
    """

    name: str
    shape: str = ONE
    target: str
    number: int = KILL
    statuses: tuple[int, ...] = (1,)
    words: tuple[str, ...] = ()
    back_s: float | None = None
    within_s: float = BOUND_S

    @property
    def comes_late(self) -> bool:
        """True if its moment is counted from where workers are there, as it needs them, or hosts
        that have met.
        """
        apart = self.shape == TWO and self.number == TERM
        return apart or self.target in (WORKER, WORKERS, LINK)

    @property
    def goes_on(self) -> bool:
        """True if the run goes on by itself."""
        return 0 in self.statuses


HANG_S = 6  # a machine with other work
HANGS = (f"launch.hang_s={HANG_S}",)
RESTARTS = ("launch.restarts=3",)
MEETS = ("launch.join_s=20",)
SAME_COMMAND = ("train.resume=auto",)  # goes on, too
TWICE_S = 1.5  # from a link's cut to a signal, and to the second
BLOWS = (
    Blow(name="worker SIGKILL", target=WORKER),
    Blow(name="worker SIGSEGV", target=WORKER, number=SEGV),
    Blow(name="workers SIGKILL", target=WORKERS),
    Blow(name="launcher SIGKILL", target=LAUNCHER),
    Blow(
        name="launcher SIGTERM",
        target=LAUNCHER,
        number=TERM,
        statuses=(PREEMPTED,),
        words=SAME_COMMAND,
    ),
    Blow(name="launcher SIGINT", target=LAUNCHER, number=INT, statuses=(INTERRUPTED,)),
    Blow(name="run SIGKILL", target=RUN),
    Blow(name="run SIGTERM", target=RUN, number=TERM, statuses=(PREEMPTED,)),
    Blow(name="run SIGINT", target=RUN, number=INT, statuses=(INTERRUPTED,)),
    Blow(name="worker SIGSTOP", target=WORKER, number=STOP, words=HANGS),
    Blow(name="worker SIGKILL, restarts", target=WORKER, statuses=(0,), words=RESTARTS),
    Blow(
        name="worker SIGSTOP, restarts",
        target=WORKER,
        number=STOP,
        statuses=(0,),
        words=(*HANGS, *RESTARTS),
    ),
    Blow(name="worker SIGKILL, two hosts", shape=TWO, target=WORKER),
    Blow(name="worker SIGSEGV, two hosts", shape=TWO, target=WORKER, number=SEGV),
    Blow(name="agent SIGKILL, two hosts", shape=TWO, target=LAUNCHER, words=MEETS),
    Blow(
        name="agent SIGTERM, two hosts",
        shape=TWO,
        target=LAUNCHER,
        number=TERM,
        statuses=(PREEMPTED,),
    ),
    Blow(
        name="host SIGSTOP, two hosts", shape=TWO, target=HOST, number=STOP, words=(*HANGS, *MEETS)
    ),
    Blow(name="link down", shape=LINKED, target=LINK, number=0, words=HANGS, within_s=HANG_S + 5),
    Blow(
        name="link down for 15 s", shape=LINKED, target=LINK, number=0, statuses=(0,), back_s=15.0
    ),
    Blow(
        name="link down, SIGINT",
        shape=LINKED,
        target=LINK,
        number=INT,
        statuses=(INTERRUPTED,),
        within_s=2 * TWICE_S + 8,  # 3 on a machine without other work
    ),
)


@dataclass(frozen=True)
class Strike:
    """A strike is a blow at a moment.

    moment: share of the run that goes before.  host, rank: which are struck, or at whose
    end a link is cut; rank is of the whole run, local_rank the same among those of its host.
    """

    seed: int
    blow: Blow
    moment: float
    host: int
    local_rank: int
    rank: int


def make_strike(seed: int, ranks: int, blows: Sequence[Blow] = BLOWS) -> Strike:
    """Make the strike of a seed; consecutive seeds take turns among `blows`.

    ranks: of the run.
    """
    chance, blow = random.Random(seed), blows[seed % len(blows)]
    hosts = 1 if blow.shape == ONE else 2
    moment, rank = chance.random(), chance.randrange(ranks)
    host, local_rank = divmod(rank, ranks // hosts)
    return Strike(seed, blow, moment, host, local_rank, rank)
