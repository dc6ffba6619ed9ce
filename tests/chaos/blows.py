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
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
SEGV, STOP = signal.SIGSEGV, signal.SIGSTOP
PREEMPTED, INTERRUPTED = 75, 130
BOUND_S = 60.0


@dataclass(frozen=True)
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
    target: str
    number: int = KILL
    shape: str = ONE
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
        return 0 in self.statuses


HANG_S = 6  # a machine with other work
HANGS = (f"launch.hang_s={HANG_S}",)
RESTARTS = ("launch.restarts=3",)
MEETS = ("launch.join_s=20",)
SAME_COMMAND = ("train.resume=auto",)  # goes on, too
TWICE_S = 1.5  # from a link's cut to a signal, and to the second
BLOWS = (
    Blow("worker SIGKILL", WORKER),
    Blow("worker SIGSEGV", WORKER, SEGV),
    Blow("workers SIGKILL", WORKERS),
    Blow("launcher SIGKILL", LAUNCHER),
    Blow("launcher SIGTERM", LAUNCHER, TERM, statuses=(PREEMPTED,), words=SAME_COMMAND),
    Blow("launcher SIGINT", LAUNCHER, INT, statuses=(INTERRUPTED,)),
    Blow("run SIGKILL", RUN),
    Blow("run SIGTERM", RUN, TERM, statuses=(PREEMPTED,)),
    Blow("run SIGINT", RUN, INT, statuses=(INTERRUPTED,)),
    Blow("worker SIGSTOP", WORKER, STOP, words=HANGS),
    Blow("worker SIGKILL, restarts", WORKER, statuses=(0,), words=RESTARTS),
    Blow("worker SIGSTOP, restarts", WORKER, STOP, statuses=(0,), words=(*HANGS, *RESTARTS)),
    Blow("worker SIGKILL, two hosts", WORKER, shape=TWO),
    Blow("worker SIGSEGV, two hosts", WORKER, SEGV, TWO),
    Blow("agent SIGKILL, two hosts", LAUNCHER, shape=TWO, words=MEETS),
    Blow("agent SIGTERM, two hosts", LAUNCHER, TERM, TWO, statuses=(PREEMPTED,)),
    Blow("host SIGSTOP, two hosts", HOST, STOP, TWO, words=(*HANGS, *MEETS)),
    Blow("link down", LINK, 0, LINKED, words=HANGS, within_s=HANG_S + 5),
    Blow("link down for 15 s", LINK, 0, LINKED, statuses=(0,), back_s=15.0),
    # 3 s on a machine without other work
    Blow("link down, SIGINT", LINK, INT, LINKED, (INTERRUPTED,), within_s=2 * TWICE_S + 8),
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
