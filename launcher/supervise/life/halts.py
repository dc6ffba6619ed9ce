"""Halts: all ranks of all hosts come to rest after the same step.  Pure.

A request that saves, or ends the run, freezes the gate of this host's ranks; the most steps that
one of them has begun are offered to the other hosts, whose launchers do the same; with the offers
of all, each opens its gate with the largest as the halt.  Every rank does the steps up to it, as
some rank has begun them and needs the others, so no step is done twice or half.  A host that does
not answer in launch.grace_s ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrun.launcher.ranks.rank_events import CANCELLED, COMPLETES, ENDS, Reason
from flowrun.launcher.supervise.life import instructions, verdicts
from flowrun.launcher.supervise.life.events import ANSWER, GRACE, Asked, Company, HaltOffered
from flowrun.launcher.supervise.life.instructions import End, say
from flowrun.launcher.supervise.life.verdicts import Terms

_OF_ONE_HOST = ("SIGTERM", verdicts.WARNING, verdicts.CTRL_C, verdicts.TIME_LIMIT)


@dataclass(frozen=True, kw_only=True)
class Halts:
    """The requests of a round, and what hosts have offered.

    terms, company: of the round.  saved: the steps of the checkpoint that ranks began at.
    ending: the request that ends the run.  halt: the step after which it ends.  late: how the run
    ends if it has no time to reach that step.
    current: the request that hosts are agreeing on.  queued: the requests that wait for it.  round:
    the number of this agreement, or of the next.  mine: the offer of this host.  came: the offers
    of other hosts, with their numbers.
    """

    terms: Terms
    company: Company
    saved: int
    ending: Asked | None = None
    halt: int | None = None
    late: End | None = None
    current: Asked | None = None
    queued: tuple[Asked, ...] = ()
    round: int = 0
    mine: HaltOffered | None = None
    came: tuple[tuple[int, HaltOffered], ...] = ()

    def ask(self, asked: Asked) -> Answer:
        """Take a request."""
        if asked.again:
            return _end_early(replace(self, ending=asked), verdicts.early_end_of(asked))
        if self.ending is not None:
            put_back = asked.by == verdicts.WARNING  # a batch job goes back into the queue
            leaves = self.ending.regroups and not asked.regroups and asked.ends
            settled = put_back or (leaves and asked.by != verdicts.NUMBERS)
            ending = replace(asked, ends=self.ending.ends) if settled else self.ending
            return replace(self, ending=ending), ()
        if self.current is not None:
            return replace(self, queued=(*self.queued, asked)), ()
        if 0 <= asked.round < self.round:
            return self, ()  # what another host asked for in an agreement that is over
        begun = replace(self, current=asked)
        if asked.by == verdicts.NUMBERS:
            return begun, (instructions.Freeze(),)
        out = (say(verdicts.describe(asked)), instructions.Freeze())
        if not asked.ends:
            return begun, out
        timer = instructions.SetTimer(GRACE, self.terms.grace_s)
        return replace(begun, ending=asked), (timer, *out)

    def freeze(self, begun: int) -> Answer:
        """The gate is frozen, and some rank of this host has begun `begun` steps."""
        asked = self.current
        if asked is None:
            return self, (instructions.HaltAfter(),)
        mine = HaltOffered(self.round, asked.by, begun, asked.ends)
        timer = instructions.SetTimer(ANSWER, self.terms.grace_s)
        out = (instructions.SendAll(mine), timer) if self.company.others else ()
        return _then(_decide(replace(self, mine=mine)), *out)

    def take_offer(self, host: int, offer: HaltOffered) -> Answer:
        """Another host offers a step, and this one joins in the agreement."""
        stored = replace(self, came=(*self.came, (host, offer)))
        joined, out = stored.ask(_join(self, host, offer))
        return _then(_decide(joined), *out)

    def time_out(self, timer: str) -> Answer:
        """A timer is over."""
        if timer == GRACE and self.ending is not None:
            late = f"the step under way was not finished and saved within {self.terms.grace_s:g} s."
            return _end_early(self, _fail("launch.grace_s", late))
        if timer == ANSWER and self.current is not None and self.mine is not None:
            failed = _fail("another host", f"it did not answer to {self.current.by}.")
            return _then(_end_early(_settle(self), failed), instructions.HaltAfter())
        return self, ()

    def find_end(self, early: bool) -> End | None:
        """Return how the run ends if it has saved all; None if it was not asked to end.

        early: ranks ended before their halt.
        """
        if self.late or self.ending is None or self.halt is None or self.ending.ends == COMPLETES:
            return None
        nothing_begun = self.halt == self.saved
        return verdicts.end_of(self.ending) if nothing_begun or not early else None


Answer = tuple[Halts, tuple[instructions.Instruction, ...]]


def _then(answer: Answer, *before: instructions.Instruction) -> Answer:
    """Return an answer with the instructions that come before its own."""
    state, after = answer
    return state, (*before, *after)


def _fail(where: str, problem: str) -> End:
    return End(instructions.FAILED, fault=Reason(where, problem), how=CANCELLED)


def _settle(halts: Halts) -> Halts:
    left = tuple((host, offer) for host, offer in halts.came if offer.round > halts.round)
    return replace(halts, current=None, round=halts.round + 1, mine=None, came=left)


def _join(halts: Halts, host: int, offer: HaltOffered) -> Asked:
    by = offer.by
    regroups = offer.ends == ENDS and halts.terms.may_change and by != verdicts.NUMBERS
    if regroups and by in _OF_ONE_HOST:
        by = f"{halts.company.name(host)} leaves ({by})"
    return Asked(by, offer.ends, regroups=regroups, round=offer.round)


def _decide(halts: Halts) -> Answer:
    """Open the gate, once all hosts have offered."""
    asked, mine = halts.current, halts.mine
    others = {host: offer for host, offer in halts.came if offer.round == halts.round}
    if asked is None or mine is None or len(others) < halts.company.others:
        return halts, ()
    offers, done = (mine, *others.values()), _settle(halts)
    timer = (instructions.SetTimer(ANSWER, -1),) if others else ()
    if asked.by == verdicts.NUMBERS:
        halt = instructions.HaltAfter(max(offer.begun for offer in offers), ENDS)
        return _then(_take_next(done), *timer, halt)
    return _then(_halt(done, asked, offers), *timer)


def _halt(halts: Halts, asked: Asked, offers: Sequence[HaltOffered]) -> Answer:
    halt, how = max(offer.begun for offer in offers), max(offer.ends for offer in offers)
    if halt >= halts.terms.steps:
        said = f"{asked.by}: the last step has begun, and the run ends with it"
        return _then(_take_next(halts), instructions.HaltAfter(), say(said))
    out: tuple[instructions.Instruction, ...] = (instructions.HaltAfter(halt, how),)
    if not how:
        return _then(_take_next(halts), *out)
    ending = replace(halts.ending or asked, ends=how)
    if not asked.ends:
        out += (instructions.SetTimer(GRACE, halts.terms.grace_s),)
    if halt == halts.saved:  # nothing has begun
        out += (instructions.SetTimer(GRACE, -1), instructions.KillRanks())
    return _then(_take_next(replace(halts, ending=ending, halt=halt)), *out)


def _take_next(halts: Halts) -> Answer:
    if not halts.queued or halts.current is not None:
        return halts, ()
    after, out = replace(halts, queued=halts.queued[1:]).ask(halts.queued[0])
    return _then(_take_next(after), *out)


def _end_early(halts: Halts, verdict: End) -> Answer:
    return replace(halts, late=halts.late or verdict), (instructions.KillRanks(),)
