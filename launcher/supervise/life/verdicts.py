"""Who is to blame, when a run gives up, and how it ends.  Pure: no process, no file, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.ranks.rank_events import Failure, Reason
from flowrun.launcher.supervise.life.events import Asked
from flowrun.launcher.supervise.life.instructions import FAILED, PREEMPTED, STOPPED, End

CTRL_C, TIME_LIMIT, WARNING = "Ctrl-C", "launch.time_limit", "SIGUSR2"
NUMBERS = "numbers that are not finite"
LAUNCHER = "the launcher"
LONGEST_WAIT_S = 60.0
MOST_ROLLBACKS = 20  # to one checkpoint: its weights, too, are no good


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a recipe says of a run's life.

    steps: of the whole training.  num_ranks: of the plan.  restarts: in a row that reach no new
    step; then the run ends.  min_ranks, grace_s: keys of launch.  rolls_back: train.on_nonfinite.
    may_change: hosts may join and leave, which counts as no restart.
    """

    steps: int
    num_ranks: int
    restarts: int = 0
    min_ranks: int = 0
    grace_s: float = 120.0
    rolls_back: bool = False
    may_change: bool = False


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """The restarts of a run so far.

    in_row: of those that reached no new step.  furthest: most steps that were ever done.  raised:
    the last attempt ended with an error of a rank's code.
    """

    in_row: int = 0
    furthest: int = 0
    raised: bool = False

    def after(self, how: str, reached: int, terms: Terms) -> Attempts | None:
        """Return the attempts with one more restart; None if the run ends.

        how: ranks ended.  reached: steps done by then.  An error that a rank's code raises again
        before there is a new step would be raised each time.
        """
        furthest = max(reached, self.furthest)
        if how == said.LEFT:
            return replace(self, furthest=furthest) if terms.may_change else None
        progress = reached > self.furthest
        in_row = 0 if progress else self.in_row
        again = how == said.RAISED and self.raised and not progress
        if how == said.CANCELLED or again or in_row >= terms.restarts:
            return None
        return replace(self, in_row=in_row + 1, furthest=furthest, raised=how == said.RAISED)

    @property
    def wait_s(self) -> float:
        """Seconds before this restart: none before the first in a row, then 1, 2, 4 and so on."""
        return min(LONGEST_WAIT_S, 2.0 ** (self.in_row - 2)) if self.in_row > 1 else 0.0


@dataclass(frozen=True)
class Rollbacks:
    """The rollbacks of a run so far.

    to: steps of the checkpoint gone back to last.  in_row: rollbacks to it, one after the other.
    """

    to: int = -1
    in_row: int = 0

    def after(self, to: int) -> Rollbacks | None:
        """Return the rollbacks with one more, to a checkpoint of `to` steps; None: the run ends."""
        in_row = self.in_row + 1 if to == self.to else 1
        return Rollbacks(to, in_row) if in_row <= MOST_ROLLBACKS else None


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What is known of the end of a round's ranks.

    failures: all of them, in the order of arrival.  death: how the first process of this host died
    by itself.  hung: why hung ranks were killed.  broken: what failed in this launcher.  killed:
    this launcher has ended its ranks.
    """

    failures: tuple[Failure, ...] = ()
    death: Reason | None = None
    hung: Reason | None = None
    broken: Reason | None = None
    killed: bool = False

    @property
    def is_early(self) -> bool:
        """True if ranks of this host ended before their last step."""
        return self.killed or self.death is not None

    def find_fault(self) -> Reason | None:
        """Return the fault that ended the run; None if it ended well.

        What failed by itself, on any host, comes before a rank that was seen to die, and both
        before those that only lost a peer.
        """
        return self.broken or (self.hung if self.is_early else None) or next(self._faults(), None)

    def _faults(self) -> Iterator[Reason]:
        yield from (failure.fault for failure in self.failures if not failure.lost_peer)
        if not self.is_early:
            return
        here = {_rank(failure.fault) for failure in self.failures if failure.host < 0}
        if self.death and _rank(self.death) not in here:
            yield self.death
        yield from (failure.fault for failure in self.failures)
        if self.death:
            yield self.death

    def find_how(self, fault: Reason) -> str:
        """Return how `fault` ended the ranks: DIED, RAISED, LEFT or CANCELLED (rank_events.py)."""
        if fault == self.broken:
            return said.CANCELLED
        failure = self.find(fault)
        return said.DIED if failure is None or failure.lost_peer else failure.how

    def find(self, fault: Reason | None) -> Failure | None:
        """Return the failure of a fault."""
        return next((each for each in self.failures if each.fault == fault), None)

    def describe(self, fault: Reason) -> Failure | None:
        """Return the event that reports a fault to other hosts; None if they know it."""
        failure = self.find(fault)
        if failure:
            lost = Failure(replace(fault, story=""), lost_peer=True)
            return lost if failure.lost_peer else None
        return Failure(fault, said.DIED if fault.where.startswith("rank") else said.LEFT)


def _rank(fault: Reason) -> str:
    return fault.where.split(",")[0]


def end_of(asked: Asked) -> End:
    """Return how a run ends that has saved all, or has nothing to save."""
    if asked.regroups:
        return End(FAILED, asked.by, Reason("the hosts", f"{asked.by}."), how=said.LEFT)
    return End(STOPPED if asked.by == CTRL_C else PREEMPTED, asked.by)


def early_end_of(asked: Asked) -> End:
    """Return how a run ends whose last steps are lost."""
    if asked.by == CTRL_C:
        return End(STOPPED, CTRL_C)
    if asked.regroups:
        return end_of(asked)
    return End(FAILED, asked.by, Reason(LAUNCHER, f"stopped by {asked.by}."), how=said.CANCELLED)


def describe(asked: Asked) -> str:
    """Say what becomes of a request."""
    if asked.regroups:
        return f"{asked.by}: the step under way is finished and saved, and the hosts meet again"
    if asked.ends == said.COMPLETES:
        return f"{asked.by} ends the run after the step under way"
    if not asked.ends:
        return f"{asked.by}: a checkpoint is written after the step under way"
    if asked.by == TIME_LIMIT:
        return f"{asked.by} is reached: the step under way is finished and saved"
    return f"{asked.by}: the step under way is finished and saved; a second one ends at once"
