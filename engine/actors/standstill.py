"""standstill: which act is owed, and by which rank, at a standstill; from counts of acts alone.

Each rank counts the acts that it has begun and done (runtime/drivers/pulse.py).  Plan and counts
say what each of them waits for: a register of its own, its turn, or another rank that has not begun
its part of a message.  These waits are followed to where they end: at a rank that runs an act, or a
reader, or is stopped, or does something else than steps; that is what all others wait for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flowrun.engine.actors.deadlock import awaited_on_rank, describe_wait, name_actor
from flowrun.engine.actors.plan import SEND, BoxWork, Plan, TransferWork
from flowrun.engine.actors.scheduler import Scheduler

# why a rank owes an act
RUNS, AFTER, READS, HALTED = "runs", "after", "reads", "halted"
SKIPS, MESSAGE, ABSENT, ELSEWHERE = "skips", "message", "absent", "elsewhere"
_SENTENCES = {
    RUNS: "rank {rank} has begun {what} and has not ended it.",
    AFTER: "rank {rank} has ended {what} and does nothing since.",
    READS: "a reader of rank {rank} has begun {what} and has not ended it.",
    HALTED: "rank {rank} {halted}.",
    SKIPS: "rank {rank} could begin {what} and does not.",
    MESSAGE: "the message of {what} from rank {rank} has not come to rank {peer}.",
    ABSENT: "rank {rank}, of {host}, {late}.",
    ELSEWHERE: "rank {rank} {activity}.",
}
_WORST_FIRST = (HALTED, RUNS, READS, AFTER, ELSEWHERE, SKIPS, MESSAGE, ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank as its counts show it.

    activity: what it does.  entered: activities begun; all ranks have the same, in one order.
    plan, steps: of an activity of steps: the plan, and the number of steps done at its end.
    begun, done: acts, by actor.
    at: the actor that its loop is in, or was in last; None: the loop sleeps.
    halted: why the process cannot run; empty if it can.
    """

    activity: str
    entered: int
    plan: Plan | None = None
    steps: int = 0
    begun: Sequence[int] = ()
    done: Sequence[int] = ()
    at: int | None = None
    halted: str = ""


class Owed(NamedTuple):
    """The act that all others wait for.

    rank: owes it.  actor, act: the act; None: none that is known.  why: RUNS and others.  peer: the
    rank that lacks a MESSAGE.
    """

    rank: int
    actor: int | None
    act: int
    why: str
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Standstill:
    """Who owes what, the worst first, and what ranks wait for, as text by rank."""

    owed: tuple[Owed, ...]
    waits: Mapping[int, tuple[str, ...]]

    def without(self, waiting: Collection[int], absent: Collection[int]) -> Standstill:
        """Return the same without what ranks owe outside of steps that are seen to wait for others
        there.  If that is all, ranks of other hosts owe it; with none there, it stays.

        waiting: ranks that are seen to wait.  absent: ranks of other hosts.
        """
        owed = tuple(o for o in self.owed if o.why != ELSEWHERE or o.rank not in waiting)
        elsewhere = tuple(Owed(rank, None, 0, ABSENT) for rank in sorted(absent))
        return replace(self, owed=owed or elsewhere or self.owed)


def find_owed(ranks: Mapping[int, RankState]) -> Standstill:
    """Follow every wait of ranks at a standstill to what is owed.

    ranks: those that are known; others count as absent.
    """
    walk = _WaitWalk(ranks)
    waits = {rank: tuple(lines) for rank, lines in walk.lines.items() if lines}
    return Standstill(tuple(_join_owed(walk.owed)), waits)


def describe_owed(
    owed: Owed,
    ranks: Mapping[int, RankState],
    host_of: Callable[[int], str] = lambda rank: "another host",
) -> str:
    """Describe what a rank owes in a sentence.

    host_of: names the host of a rank for a person.
    """
    rank, actor, act, why, peer = owed
    state = ranks.get(rank)
    plan = next((s.plan for s in (state, *ranks.values()) if s and s.plan), None)
    what = _name_act(plan, actor, act) if plan and actor is not None else ""
    halted = state.halted if state else ""
    return _SENTENCES[why].format(
        rank=rank,
        what=what,
        peer=peer,
        halted=halted + (f"; it owes {what}" if what else ""),
        host=host_of(rank) if why == ABSENT else "",
        late=f"has not begun {what}" if what else "has not come to the others",
        activity=state.activity if state else "is elsewhere",
    )


def _name_act(plan: Plan, actor: int, act: int) -> str:
    """Name an act by its actor, step and micro-batch."""
    step, micro_batch = divmod(act, plan.acts_per_step(plan.actors[actor]))
    part = "" if plan.actors[actor].per_step else f", micro-batch {micro_batch}"
    return f"{name_actor(plan, actor)} (step {step}{part})"


def _join_owed(owed: Iterable[Owed]) -> list[Owed]:
    """Keep the earliest act of each rank, the worst first."""
    first: dict[tuple[int, int | None], Owed] = {}
    for each in sorted(owed, key=lambda o: (o.actor is None, o.act, o.actor or 0)):
        first.setdefault((each.rank, each.peer), each)
    return sorted(first.values(), key=lambda o: (_WORST_FIRST.index(o.why), o.rank))


Waiter = tuple[int, int | None]  # rank and actor; None: whatever the rank is at


class _WaitWalk:
    """A walk from all ranks along what they wait for."""

    def __init__(self, ranks: Mapping[int, RankState]) -> None:
        self.ranks = ranks
        self.schedulers = {
            rank: Scheduler.from_counts(
                s.plan, s.plan.stage_of(rank), s.steps, begun=s.begun, done=s.done
            )
            for rank, s in ranks.items()
            if s.plan is not None
        }
        self.missing = {rank: scheduler.waits() for rank, scheduler in self.schedulers.items()}
        self.owed: set[Owed] = set()
        self.lines: dict[int, list[str]] = {rank: [] for rank in ranks}
        todo: list[Waiter] = [(rank, None) for rank in sorted(self.ranks, reverse=True)]
        seen: set[Waiter] = set()
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += self._follow(*node)
        named = {owed.rank for owed in self.owed}
        for rank, state in self.ranks.items():  # nobody asks it for a certain act
            if state.halted and rank not in named:
                self._owe(rank, None, 0, HALTED)

    def _owe(
        self, rank: int, actor: int | None, act: int, why: str, peer: int | None = None
    ) -> tuple[Waiter, ...]:
        self.owed.add(Owed(rank, actor, act, why, peer))
        return ()

    def _follow(self, rank: int, actor: int | None) -> Sequence[Waiter]:
        """Return what a node waits for; nothing where the wait ends in something owed."""
        state = self.ranks.get(rank)
        if state is None:
            return self._owe(rank, actor, 0, ABSENT)
        if state.plan is None:
            return self._follow_activity(rank, state)
        if (at := state.at) is not None:  # the act that its loop is in, or was in last
            ended = state.begun[at] == state.done[at]
            why = HALTED if state.halted else AFTER if ended else RUNS
            return self._owe(rank, at, state.done[at] - ended, why)
        if state.halted:
            return () if actor is None else self._owe(rank, actor, state.done[actor], HALTED)
        if actor is None:
            return [(rank, each) for each in (self.schedulers[rank].busy() or self.missing[rank])]
        if state.begun[actor] > state.done[actor]:
            return self._follow_message(rank, state, state.plan, actor)
        return self._follow_registers(rank, state, actor)

    def _follow_activity(self, rank: int, state: RankState) -> Sequence[Waiter]:
        """Return the ranks that have not come as far as one that is not in its steps."""
        late = [k for k, other in self.ranks.items() if other.entered < state.entered]
        if state.halted or not late:
            return self._owe(rank, None, 0, HALTED if state.halted else ELSEWHERE)
        names = ", ".join(map(str, sorted(late)))
        self.lines[rank].append(f"rank {rank} {state.activity}; not so far: rank {names}")
        return [(k, None) for k in late]

    def _follow_message(
        self, rank: int, state: RankState, plan: Plan, actor: int
    ) -> Sequence[Waiter]:
        """Return the other ends of an act under way that have not been begun."""
        act, ends = state.done[actor], other_ends(plan, rank, actor)
        if not ends:
            why = READS if plan.actors[actor].makes_batches else RUNS
            return self._owe(rank, actor, act, why)
        if late := [end for end in ends if self._count(state, *end, begun=True) <= act]:
            self.lines[rank].append(
                f"rank {rank} waits in {_name_act(plan, actor, act)} for "
                f"{', '.join(f'rank {other}' for other, _ in late)} to come to it"
            )
            return self._find_waited(state, late)
        awake = {k for k, each in self.ranks.items() if each.at is not None or each.halted}
        if not awake.isdisjoint(other for other, _ in ends):
            return [(other, None) for other, _ in ends if other in awake]
        self._owe_message(rank, state, act, ends)
        return ()

    def _owe_message(
        self, rank: int, state: RankState, act: int, ends: Sequence[tuple[int, int]]
    ) -> None:
        """Let those ends that have done the act owe its message to a rank, or all if none has."""
        past = [end for end in ends if self._count(state, *end, begun=False) > act]
        for other, end in past or ends:
            self._owe(other, end, act, MESSAGE, rank)

    def _find_waited(self, state: RankState, late: Sequence[tuple[int, int]]) -> Sequence[Waiter]:
        """Return the ends that have not begun an act; no actor of a rank that is in other steps."""
        elsewhere = {k for k, each in self.ranks.items() if each.entered != state.entered}
        return [(other, None if other in elsewhere else end) for other, end in late]

    def _count(self, state: RankState, rank: int, actor: int, *, begun: bool) -> float:
        """Return how many acts of an actor another rank has begun or done, as `state` counts."""
        other = self.ranks.get(rank)
        if other is None or other.entered < state.entered:
            return -1
        if other.entered > state.entered:
            return math.inf
        return (other.begun if begun else other.done)[actor]

    def _follow_registers(self, rank: int, state: RankState, actor: int) -> Sequence[Waiter]:
        """Return the actors of the same rank that an idle one waits for."""
        scheduler, nodes = self.schedulers[rank], []
        for why, what in self.missing[rank].get(actor, ()):
            awaited = awaited_on_rank(scheduler, actor, why, what)
            if awaited is not None:
                self.lines[rank].append(describe_wait(scheduler, rank, actor, why, what))
                nodes.append((rank, awaited))
        return nodes or self._owe(rank, actor, state.done[actor], SKIPS)


def other_ends(plan: Plan, rank: int, actor: int) -> list[tuple[int, int]]:
    """Return the (rank, actor) that take part in the acts of an actor; none if it acts alone."""
    described = plan.actors[actor]
    match described.work:
        case BoxWork() as work:
            group = plan.placements[described.stage].group(rank, work.step.axis)
            return [(other, actor) for other in group if other != rank]
        case TransferWork() as work:
            sends = described.kind == SEND
            there = next(other for other in plan.channel_ends[work.channel] if other != actor)
            routes = {(one.source, one.target) for route in plan.routes(work) for one in route}
            ends = routes if sends else {(target, source) for source, target in routes}
            return [(other, there) for here, other in sorted(ends) if here == rank]
    return []
