"""Halts: all ranks of all hosts come to rest after one step.  Pure.

A request that saves, or ends the run, freezes the gate of this host's ranks; what a rank has begun
most is offered to the other hosts, whose launchers do the same; with the offers of all, each opens
its gate with the largest as the halt.  Every rank does the steps up to it, as some rank has begun
them and needs the others, so no step is done twice or half.  A host that does not answer in
launch.grace_s ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flowrun.launcher.ranks.rank_events import COMPLETES, ENDS, Reason
from flowrun.launcher.supervise.life.events import ANSWER, GRACE, STOPPED, Asked, HaltOffered
from flowrun.launcher.supervise.life.instructions import (
    FAILED,
    Freeze,
    HaltAfter,
    Instruction,
    KillRanks,
    Note,
    SendAll,
    SetTimer,
)
from flowrun.launcher.supervise.life.verdicts import (
    CTRL_C,
    NUMBERS,
    TIME_LIMIT,
    WARNING,
    Verdict,
    describe,
    early_end_of,
    end_of,
)

_OF_ONE_HOST = ("SIGTERM", WARNING, CTRL_C, TIME_LIMIT)


@dataclass(frozen=True, kw_only=True)
class Company:
    """The hosts of a round.

    number, names: of this one and of all; no names: it is alone.  shared: it writes to the folder
    of the first.  may_change: hosts may join and leave.
    """

    number: int = 0
    names: tuple[str, ...] = ()
    shared: bool = False
    may_change: bool = False

    @property
    def others(self) -> int:
        """How many other hosts there are."""
        return max(0, len(self.names) - 1)

    def name(self, number: int) -> str:
        """Name a host for a person."""
        return f"host {number} ({self.names[number]})" if self.names else "this host"


@dataclass(frozen=True, kw_only=True)
class Halts:
    """The requests of a round.

    company, steps, grace_s, saved: of the round: its hosts, steps of the whole run, launch.grace_s,
    steps of the checkpoint that ranks began at.
    ending: the request that the run ends for.  halt: the step after which it does.  completes: it
    is complete then.  late: how it ends if it is not left the time to do so.
    current: the request that is being agreed on.  mine: what this host has offered for it.
    round: of the next agreement.  offers: of other hosts, with their numbers.  queued: requests
    that wait.
    """

    company: Company
    steps: int
    grace_s: float
    saved: int
    ending: Asked | None = None
    halt: int | None = None
    completes: bool = False
    late: Verdict | None = None
    current: Asked | None = None
    agreement: Agreement = field(default_factory=lambda: Agreement())

    def ask(self, asked: Asked) -> Answer:
        """Take a request."""
        if asked.again:
            return replace(self, late=self.late or early_end_of(asked)), (KillRanks(),)
        if self.ending is not None:
            put_back = asked.by == WARNING  # a batch job goes back into the queue
            leaves = self.ending.regroups and not asked.regroups and asked.ends
            settled = put_back or (leaves and asked.by != NUMBERS)
            return (replace(self, ending=asked) if settled else self), ()
        if self.current is not None:
            return replace(self, agreement=self.agreement.queue(asked)), ()
        if 0 <= asked.round < self.agreement.round:
            return self, ()  # what another host asked for in an agreement that is over
        return _begin(self, asked)

    def freeze(self, begun: int) -> Answer:
        """The gate is frozen, and some rank of this host has begun `begun` steps."""
        asked = self.current
        if asked is None:
            return self, (HaltAfter(),)
        ends = COMPLETES if asked.completes else ENDS if asked.ends else 0
        sees = self.company.number == 0 or self.company.shared
        mine = HaltOffered(self.agreement.round, asked.by, begun, ends, sees)
        offered = replace(self, agreement=self.agreement.offer(mine))
        out: tuple[Instruction, ...] = ()
        if self.company.others:
            out = SendAll(mine), SetTimer(ANSWER, self.grace_s)
        return _then(_decide(offered), out)

    def take_offer(self, host: int, offer: HaltOffered) -> Answer:
        """Another host offers a step, and this one joins in the agreement."""
        stored = replace(self, agreement=self.agreement.take(host, offer))
        joined, out = stored.ask(_join(self, host, offer))
        return _then(_decide(joined), out)

    def time_out(self, timer: str) -> Answer:
        """A timer is over."""
        if timer == GRACE and self.ending is not None:
            problem = f"the step under way was not finished and saved within {self.grace_s:g} s."
            return _end_early(self, Verdict(FAILED, "", Reason("launch.grace_s", problem), STOPPED))
        if timer == ANSWER and self.current is not None and self.agreement.mine is not None:
            fault = Reason("another host", f"it did not answer to {self.current.by}.")
            ended, out = _end_early(self, Verdict(FAILED, "", fault, STOPPED))
            return replace(ended, current=None, agreement=self.agreement.next()), (
                HaltAfter(),
                *out,
            )
        return self, ()

    def find_end(self, early: bool) -> Verdict | None:
        """Return how the run ends if it has saved all; None if it was not asked to end.

        early: ranks ended before their halt.
        """
        if self.late or self.ending is None or self.halt is None or self.completes:
            return None
        nothing_begun = self.halt == self.saved
        return end_of(self.ending) if nothing_begun or not early else None


@dataclass(frozen=True)
class Agreement:
    """What hosts have offered.

    round: of the next offer of this host, or of the one that it has made.  mine: that.  came: of
    other hosts, with their numbers.  queued: requests that wait for this agreement to end.
    """

    round: int = 0
    mine: HaltOffered | None = None
    came: tuple[tuple[int, HaltOffered], ...] = ()
    queued: tuple[Asked, ...] = ()

    @property
    def others(self) -> dict[int, HaltOffered]:
        """What other hosts offer in this round."""
        return {host: offer for host, offer in self.came if offer.round == self.round}

    def queue(self, asked: Asked) -> Agreement:
        """Let a request wait."""
        return replace(self, queued=(*self.queued, asked))

    def offer(self, mine: HaltOffered) -> Agreement:
        """Take what this host offers."""
        return replace(self, mine=mine)

    def take(self, host: int, offer: HaltOffered) -> Agreement:
        """Take what another host offers."""
        return replace(self, came=(*self.came, (host, offer)))

    def next(self) -> Agreement:
        """Return what is left for the next round."""
        left = tuple((host, offer) for host, offer in self.came if offer.round > self.round)
        return replace(self, round=self.round + 1, mine=None, came=left)


Answer = tuple[Halts, tuple[Instruction, ...]]


def _then(answer: Answer, before: Sequence[Instruction]) -> Answer:
    """Return an answer with the instructions that come before its own."""
    state, after = answer
    return state, (*before, *after)


def _begin(halts: Halts, asked: Asked) -> Answer:
    begun, out = replace(halts, current=asked), list[Instruction]()
    if asked.by != NUMBERS:
        if asked.ends:
            begun = replace(begun, ending=asked)
            out.append(SetTimer(GRACE, halts.grace_s))
        out.append(Note(describe(asked)))
    return begun, (*out, Freeze())


def _join(halts: Halts, host: int, offer: HaltOffered) -> Asked:
    by, may_change = offer.by, halts.company.may_change
    regroups = offer.ends == ENDS and may_change and by != NUMBERS
    if regroups and by in _OF_ONE_HOST:
        by = f"{halts.company.name(host)} leaves ({by})"
    completes = offer.ends == COMPLETES
    return Asked(by, offer.ends > 0, regroups=regroups, completes=completes, round=offer.round)


def _decide(halts: Halts) -> Answer:
    """Open the gate, once all hosts have offered."""
    asked, mine = halts.current, halts.agreement.mine
    others = halts.agreement.others
    if asked is None or mine is None or len(others) < halts.company.others:
        return halts, ()
    offers = (mine, *others.values())
    done = replace(halts, current=None, agreement=halts.agreement.next())
    timer = (SetTimer(ANSWER, -1),) if others else ()
    if asked.by == NUMBERS:
        halt = HaltAfter(max(offer.begun for offer in offers), ENDS)
        return _then(_take_next(done), (*timer, halt))
    if not all(offer.sees for offer in offers):
        return _then(_save_nothing(done, asked), timer)
    return _then(_halt(done, asked, offers), timer)


def _save_nothing(halts: Halts, asked: Asked) -> Answer:
    said = f"{asked.by}: nothing is saved, as the hosts do not share the run's folder"
    out = (HaltAfter(), Note(said))
    if asked.ends and asked.round < 0:
        return _then(_end_early(halts, early_end_of(asked)), out)
    return _then(_take_next(halts), out)


def _halt(halts: Halts, asked: Asked, offers: Sequence[HaltOffered]) -> Answer:
    halt, ends = max(offer.begun for offer in offers), max(offer.ends for offer in offers)
    if halt >= halts.steps:
        said = f"{asked.by}: the last step has begun, and the run ends with it"
        return _then(_take_next(halts), (HaltAfter(), Note(said)))
    out: tuple[Instruction, ...] = (HaltAfter(halt, ends),)
    if not ends:
        return _then(_take_next(halts), out)
    done = replace(halts, ending=halts.ending or asked, halt=halt, completes=ends == COMPLETES)
    if not asked.ends:
        out += (SetTimer(GRACE, halts.grace_s),)
    if halt == halts.saved:  # nothing has begun
        out += (SetTimer(GRACE, -1), KillRanks())
    return _then(_take_next(done), out)


def _take_next(halts: Halts) -> Answer:
    queued = halts.agreement.queued
    if not queued or halts.current is not None:
        return halts, ()
    left = replace(halts, agreement=replace(halts.agreement, queued=queued[1:]))
    after, out = left.ask(queued[0])
    return _then(_take_next(after), out)


def _end_early(halts: Halts, verdict: Verdict) -> Answer:
    return replace(halts, late=halts.late or verdict), (KillRanks(),)
