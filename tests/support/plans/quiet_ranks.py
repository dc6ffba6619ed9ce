"""Ranks of a plan that act in any order until one fault leaves all of them quiet: schedulers and
counts alone, no tensors, no processes.
"""

import random
from dataclasses import dataclass, field

from flowrun.engine.actors.plan import Plan
from flowrun.engine.actors.protocol import LaunchAct
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.actors.standstill import RankState, other_ends

COMPUTES, ISSUES, TAKES = "computes", "issues", "takes"
READS, SKIPS, LOSES = "reads", "skips", "loses"


@dataclass(frozen=True)
class Fault:
    """At act `act` of an actor a rank stops for ever: while it computes, issues, takes or reads; or
    it skips the act; or it loses the message that it sends (it counts it as sent).
    """

    how: str
    rank: int
    actor: int
    act: int


@dataclass
class QuietRank:
    """A rank: what its loop would do, with counts as a pulse has them."""

    rank: int
    scheduler: Scheduler
    begun: list[int]
    done: list[int]
    at: int | None = None
    stopped: bool = False
    came: list[int] = field(default_factory=list)  # actors under way whose messages have come


class QuietRanks:
    def __init__(self, plan: Plan, steps: int, fault: Fault | None, seed: int) -> None:
        self.plan, self.steps, self.fault = plan, steps, fault
        self.random = random.Random(seed)
        zeros = [0] * len(plan.actors)
        self.ranks = {
            rank: QuietRank(rank, Scheduler(plan, stage, steps), [*zeros], [*zeros])
            for stage, placement in enumerate(plan.placements)
            for rank in placement.ranks
        }
        self.sent: set[tuple[int, int, int]] = set()  # rank, actor, act: what the others may read
        self.under_way: set[tuple[int, int, int]] = set()

    def run(self) -> dict[int, RankState]:
        """Act until nothing can; return what the counts say."""
        while any([self._round(rank) for rank in self._in_any_order()]):
            pass
        return {
            rank: RankState(
                activity="trains",
                entered=1,
                plan=self.plan,
                steps=self.steps,
                begun=tuple(one.begun),
                done=tuple(one.done),
                at=one.at,
            )
            for rank, one in self.ranks.items()
        }

    @property
    def finished(self) -> bool:
        return all(one.scheduler.is_finished() for one in self.ranks.values())

    def _in_any_order(self) -> list[QuietRank]:
        order = list(self.ranks.values())
        self.random.shuffle(order)
        return order

    def _is(self, how: str, one: QuietRank, actor: int, act: int) -> bool:
        return self.fault == Fault(how, one.rank, actor, act)

    def _round(self, one: QuietRank) -> bool:
        """Do what a loop does in one round; False if nothing happened."""
        happened = False
        while not one.stopped and (launched := one.scheduler.next_communication()):
            happened = True
            self._issue(one, launched)
        while not one.stopped and (launched := one.scheduler.next_supply()):
            happened = True
            one.begun[launched.actor] += 1
            if not self._is(READS, one, *launched):
                self.under_way.add((one.rank, *launched))
        self._deliver(one)
        if one.stopped:
            return happened
        if one.came and self.random.random() < 0.7:
            actor = one.came.pop(self.random.randrange(len(one.came)))
            self._take(one, actor)
        elif launched := one.scheduler.next_compute():
            self._compute(one, launched)
        elif not one.came:
            one.at = None
            return happened
        return True

    def _issue(self, one: QuietRank, launched: LaunchAct) -> None:
        if self._is(SKIPS, one, *launched):
            one.at, one.stopped = None, False
            return
        one.at = launched.actor
        one.begun[launched.actor] += 1
        if self._is(ISSUES, one, *launched):
            one.stopped = True
            return
        self.under_way.add((one.rank, *launched))
        if not self._is(LOSES, one, *launched):
            self.sent.add((one.rank, *launched))

    def _deliver(self, one: QuietRank) -> None:
        for mine in sorted(m for m in self.under_way if m[0] == one.rank):
            _, actor, act = mine
            ends = other_ends(self.plan, one.rank, actor)
            if all((other, end, act) in self.sent for other, end in ends):
                self.under_way.discard(mine)
                one.came.append(actor)

    def _take(self, one: QuietRank, actor: int) -> None:
        one.at = actor
        if self._is(TAKES, one, actor, one.done[actor]):
            one.stopped = True
            return
        self._end(one, actor)

    def _compute(self, one: QuietRank, launched: LaunchAct) -> None:
        one.at = launched.actor
        one.begun[launched.actor] += 1
        if self._is(COMPUTES, one, *launched):
            one.stopped = True
            return
        self._end(one, launched.actor)

    def _end(self, one: QuietRank, actor: int) -> None:
        one.scheduler.end_act(actor)
        one.done[actor] += 1
