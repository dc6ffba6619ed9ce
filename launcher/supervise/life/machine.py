"""The machine of a run's life: `step(state, event) -> (state, instructions)`.  Pure: no process, no
file, no clock.  The driver feeds it with what happens, and its hands do what it asks (driver.py).

A run is a sequence of rounds.  In each, the hosts meet, ranks are forked, train, and have all
gone; the hosts part; and a verdict says what comes next.

    phase      what is awaited                       then
    MEETING    the hosts of a round                  Met: FORKING; PlanWanted: PLANNING
    FORKING    the processes of this host's ranks    RanksForked: TRAINING
    TRAINING   that all of them have gone            RanksGone: PARTING
    PARTING    what other hosts have still to say    Parted: RESTING, SAVING or OVER, by the verdict
    RESTING    the newest whole state, and a pause   StartFound, TimeIsUp: MEETING
    SAVING     what ranks left in memory, on a disk  StateSaved: PLANNING for fewer ranks, or OVER
    PLANNING   another plan                          NewPlan: MEETING; NoPlan: OVER
    OVER       nothing

What holds, for any order of events (`violations`, and tests/launcher/supervise):

**Nothing is lost.**  A checkpoint is completed once each rank has written its file, and a step
counts once its results are here.  What is asked while no ranks run waits for them, or ends the run
where nothing can be lost.
**Nobody waits for ever.**  A phase in which others are awaited has a timer, a limit of the hand, or
the watch; a gate that is frozen belongs to a request.
**There is one verdict.**  `End` comes once, and nothing follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.life import events as ev
from flowrun.launcher.supervise.life import instructions as do
from flowrun.launcher.supervise.life.halts import Company, Halts
from flowrun.launcher.supervise.life.verdicts import (
    LAUNCHER,
    NUMBERS,
    Attempts,
    Blame,
    Failure,
    Rollbacks,
    Verdict,
    early_end_of,
    end_of,
)

_LINGER_S = 2.0  # after a rank failed, those that wait for it in vain are killed
_PART_S = 1.0  # for other hosts to end after a failure, before the ranks' store closes
NEVER_S = float("inf")


class Life(Enum):
    """What a run awaits; see above."""

    MEETING, FORKING, TRAINING, PARTING, RESTING, SAVING, PLANNING, OVER = range(8)


_RANKS_HERE = (Life.FORKING, Life.TRAINING, Life.PARTING)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a recipe says of a run's life.

    steps: of the whole training.  num_ranks: of the plan.  restarts, min_ranks, grace_s: keys of
    launch.  rolls_back: train.on_nonfinite.  may_change: hosts may join and leave.
    """

    steps: int
    num_ranks: int
    restarts: int = 0
    min_ranks: int = 0
    grace_s: float = 120.0
    rolls_back: bool = False
    may_change: bool = False


@dataclass(frozen=True, kw_only=True)
class Round:
    """The ranks of a round.

    halts: what is asked of them.  blame: why they end.  ended: ranks that have ended well.  bad:
    steps begun by the end of one whose numbers are not finite; 0: no such.  files: of each
    checkpoint that is being written, those that are on the disk.  lingers: a timer is set, after
    which they are killed.  verdict: how they have ended.  rests: only a pause is left before the
    next round.
    """

    halts: Halts
    blame: Blame = field(default_factory=Blame)
    ended: frozenset[int] = frozenset()
    bad: int = 0
    files: Mapping[int, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    lingers: bool = False
    verdict: Verdict | None = None
    rests: bool = False


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run on one host.

    place: where its ranks begin, or have begun.  reached: steps done.  round: of ranks that run, or
    of the last.  attempts, rollbacks: so far.  lost: why ranks are to begin again, which is not
    written down yet.  waiting: events that wait for ranks to run.
    """

    terms: Terms
    phase: Life
    company: Company
    round: Round
    attempts: Attempts
    place: ev.StartPlace = field(default_factory=ev.StartPlace)
    reached: int = 0
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    lost: said.Reason | None = None
    waiting: tuple[Notice, ...] = ()


Move = tuple[RunState, tuple[do.Instruction, ...]]


def begin(terms: Terms, place: ev.StartPlace, reached: int = 0) -> Move:
    """Return the state of a run that begins at a place, and what it does first."""
    company = Company(may_change=terms.may_change)
    state = RunState(
        terms=terms,
        phase=Life.MEETING,
        company=company,
        round=_new_round(terms, company, place),
        attempts=Attempts(
            limit=terms.restarts, may_change=terms.may_change, furthest=max(reached, place.step)
        ),
        place=place,
        reached=max(reached, place.step),
    )
    return state, (do.Meet(),)


def step(state: RunState, event: Notice) -> Move:
    """Take an event; return the state after it, and what is to be done."""
    if state.phase is Life.OVER:
        return state, ()
    host = -1
    if isinstance(event, ev.FromHost):
        host, event = event.host, event.event
    here = state.phase is Life.TRAINING and host < 0 and state.company.others
    sends = (do.SendAll(event),) if here and _concerns_all(event) else ()
    if state.round.blame.broken and isinstance(event, _OF_RANKS):
        return state, ()  # pipes are still emptied: no rank must block
    after, out = state, tuple[do.Instruction, ...]()
    if take := _OF_A_HOST.get(type(event)):
        after, out = take(state, event, host)
    elif take_here := _TABLE.get(type(event)):
        after, out = take_here(state, event)
    return _kill_once(state, after, (*sends, *out))


def violations(state: RunState) -> tuple[str, ...]:
    """Return the invariants that a state breaks: none for every state that the machine reaches."""
    terms, halts, phase = state.terms, state.round.halts, state.phase
    blame, verdict = state.round.blame, state.round.verdict
    rules = (
        (halts.halt is not None and halts.ending is None, "it halts, and nobody has asked for it"),
        (halts.halt is not None and halts.halt > terms.steps, "it halts after the last step"),
        (halts.agreement.mine is not None and not halts.current, "a gate is frozen for nobody"),
        (not state.round.ended <= set(range(terms.num_ranks)), "a rank has ended that is not here"),
        (any(len(f) >= terms.num_ranks for f in state.round.files.values()), "a whole checkpoint"),
        (bool(state.round.files) and state.company.number > 0, "another host's files"),
        (verdict is not None and phase in (Life.FORKING, Life.TRAINING), "an early verdict"),
        (verdict is None and phase in (Life.RESTING, Life.SAVING), "it rests without a verdict"),
        (bool(state.waiting) and phase is Life.TRAINING, "a request waits, though ranks run"),
        (phase is Life.OVER and bool(state.waiting), "a request waits for ever"),
        (
            state.reached < 0 or state.place.step < state.place.saved,
            "it begins before a checkpoint",
        ),
        (blame.killed and phase is Life.MEETING, "ranks are killed that do not run"),
    )
    return tuple(broken for is_broken, broken in rules if is_broken)


def _new_round(terms: Terms, company: Company, place: ev.StartPlace) -> Round:
    halts = Halts(company=company, steps=terms.steps, grace_s=terms.grace_s, saved=place.saved)
    return Round(halts=halts)


def _concerns_all(event: Notice) -> bool:
    """Return whether other hosts get an event of a rank of this host: all but remarks, a rank's own
    weights, and an error that is another rank's fault.
    """
    if isinstance(event, said.RankFailed):
        return not event.lost_peer
    return isinstance(
        event, (said.StepDone, said.Evaluated, said.FileWritten, said.RankEnded, said.BadStep)
    )


def _kill_once(before: RunState, after: RunState, out: tuple[do.Instruction, ...]) -> Move:
    """Let ranks be killed once, and only while they run; those that are being forked, when they
    do.
    """
    others = tuple(each for each in out if not isinstance(each, do.KillRanks))
    if len(others) == len(out) or after.phase not in (Life.FORKING, Life.TRAINING):
        return after, others
    begins = before.phase is Life.FORKING and after.phase is Life.TRAINING
    kills = after.phase is Life.TRAINING and (begins or not before.round.blame.killed)
    return _blame(after, killed=True), (*others, do.KillRanks()) if kills else others


def _blame(state: RunState, **known: Any) -> RunState:
    blame = replace(state.round.blame, **known)
    return replace(state, round=replace(state.round, blame=blame))


# ---- events of ranks -----------------------------------------------------------------------------


def _take_step(state: RunState, event: said.StepDone) -> Move:
    return replace(state, reached=event.step + 1), (do.Publish(event),)


def _take_evaluation(state: RunState, event: said.Evaluated) -> Move:
    return state, (do.Publish(event),)


def _take_file(state: RunState, event: said.FileWritten) -> Move:
    """A rank has written its file of a checkpoint; the last one completes it."""
    if state.company.number:
        return state, ()
    files = dict(state.round.files)
    there = {**files.pop(event.step, {}), event.name: event.written}
    out: tuple[do.Instruction, ...] = ()
    if len(there) == state.terms.num_ranks:
        out = (do.CompleteCheckpoint(event.folder, event.step, there),)
        if state.company.others:
            out += (do.SendAll(ev.CheckpointKept(event.step)),)
    else:
        files[event.step] = there
    return replace(state, round=replace(state.round, files=files)), out


def _take_remark(state: RunState, event: said.Remarked) -> Move:
    return state, (do.Note(event.text),)


def _take_end(state: RunState, event: said.RankEnded) -> Move:
    return replace(state, round=replace(state.round, ended=state.round.ended | {event.rank})), ()


def _take_bad_step(state: RunState, event: said.BadStep) -> Move:
    return replace(state, round=replace(state.round, bad=event.steps)), ()


def _take_numbers(state: RunState, event: said.NumbersSeen) -> Move:
    return _ask(state, ev.Asked(NUMBERS))


def _take_rank_failure(state: RunState, event: said.RankFailed, host: int) -> Move:
    return _fail(state, Failure(event.fault, ev.RAISED, event.lost_peer, host))


def _take_host_failure(state: RunState, event: ev.HostFailed, host: int) -> Move:
    return _fail(state, Failure(event.fault, event.how, event.lost_peer, host))


def _take_gone(state: RunState, event: ev.HostGone) -> Move:
    fault = said.Reason(f"host {event.host} ({event.name})", event.why)
    return _fail(state, Failure(fault, ev.LEFT, host=event.host))


def _fail(state: RunState, failure: Failure) -> Move:
    """Note a failure: ranks that wait in vain are killed, at once if another host's failed."""
    if state.phase not in _RANKS_HERE:
        return state, ()
    state = _blame(state, failures=(*state.round.blame.failures, failure))
    if failure.host >= 0:
        return state, (do.KillRanks(),)
    return (state, ()) if failure.lost_peer else _linger(state)


def _linger(state: RunState) -> Move:
    if state.round.lingers:
        return state, ()
    state = replace(state, round=replace(state.round, lingers=True))
    return state, (do.SetTimer(ev.LINGER, _LINGER_S),)


# ---- events of processes -------------------------------------------------------------------------


def _take_forked(state: RunState, event: ev.RanksForked) -> Move:
    """Ranks run: what was asked before is taken now."""
    if state.phase is not Life.FORKING:
        return state, ()
    out: tuple[do.Instruction, ...] = (do.KillRanks(),) if state.round.blame.killed else ()
    waiting, place = state.waiting, event.place
    halts = replace(state.round.halts, saved=place.saved)
    state = replace(
        state,
        phase=Life.TRAINING,
        place=place,
        reached=place.step,
        waiting=(),
        round=replace(state.round, halts=halts),
    )
    for each in waiting:
        state, more = step(state, each)
        out += more
    return state, out


def _take_death(state: RunState, event: ev.RankDied) -> Move:
    blame = state.round.blame
    if blame.killed or blame.death:
        return state, ()
    return _linger(_blame(state, death=said.Reason(f"rank {event.rank}", event.how)))


def _take_hang(state: RunState, event: ev.HangSeen) -> Move:
    return _blame(state, hung=event.fault), (do.KillRanks(),)


def _take_frozen(state: RunState, event: ev.Frozen) -> Move:
    return _with_halts(state, state.round.halts.freeze(event.begun))


def _take_ranks_gone(state: RunState, event: ev.RanksGone) -> Move:
    """Part from the other hosts, and let those know of a failure that do not."""
    if state.phase is not Life.TRAINING:
        return state, ()
    early = state.round.blame.is_early
    timers = tuple(do.SetTimer(timer, -1) for timer in (ev.GRACE, ev.ANSWER, ev.LINGER))
    verdict, blame = _find_verdict(state), state.round.blame
    round_ = replace(state.round, verdict=verdict)
    state = replace(state, phase=Life.PARTING, round=round_)
    if verdict is None or (verdict.status != do.FAILED and not early):
        return state, (*timers, do.LeaveRound(NEVER_S))
    asked, heard = state.round.halts.find_end(early), None
    if verdict.fault and not asked:
        heard = blame.describe(verdict.fault)
    elif verdict.status == do.STOPPED and state.round.halts.late:
        heard = ev.HostFailed(said.Reason(LAUNCHER, "stopped by Ctrl-C."), ev.LEFT)
    sends = (do.SendAll(heard),) if heard and state.company.others else ()
    within_s = NEVER_S if asked and not early else _PART_S
    return state, (*timers, *sends, do.LeaveRound(within_s))


def _find_verdict(state: RunState) -> Verdict | None:
    """Return how the ranks ended; None: well."""
    blame, halts = state.round.blame, state.round.halts
    asked = halts.find_end(blame.is_early)
    if asked and not blame.broken:
        return asked
    late = halts.late
    if late and late.status == do.STOPPED and not blame.broken:
        return late
    fault = blame.find_fault() or (late.fault if late else None)
    if fault is None:
        return None
    how = blame.find_how(fault)
    if halts.ending:
        how = ev.LEFT if halts.ending.regroups else ev.STOPPED
    return Verdict(do.FAILED, "", fault, how)


# ---- events of hosts -----------------------------------------------------------------------------


def _take_met(state: RunState, event: ev.Met) -> Move:
    company = replace(state.company, number=event.number, names=event.names, shared=event.shared)
    out: tuple[do.Instruction, ...] = ()
    if state.lost:
        out = (_restart(state, state.lost, state.place),)
    round_ = _new_round(state.terms, company, state.place)
    state = replace(state, phase=Life.FORKING, company=company, round=round_, lost=None)
    return state, (*out, do.ForkRanks())


def _take_plan_wanted(state: RunState, event: ev.PlanWanted) -> Move:
    place = ev.StartPlace(event.step, "checkpoint" if event.step else "beginning", event.step)
    out: tuple[do.Instruction, ...] = ()
    if state.lost:
        out = (_restart(state, state.lost, place),)
    state = replace(state, phase=Life.PLANNING, lost=None)
    return state, (*out, do.ReplanHosts(event.num_hosts, event.step))


def _restart(state: RunState, fault: said.Reason, place: ev.StartPlace) -> do.Restart:
    return do.Restart(fault, place, state.attempts.in_row, state.attempts.limit)


def _take_meeting_failure(state: RunState, event: ev.MeetingFailed) -> Move:
    return _end(state, do.End(do.FAILED, fault=event.fault, refused=event.refused))


def _take_complete(state: RunState, event: ev.AlreadyComplete) -> Move:
    return _end(state, do.End(do.THERE))


def _take_offer(state: RunState, event: ev.HaltOffered, host: int) -> Move:
    if state.phase is Life.FORKING:
        return _wait(state, ev.FromHost(host, event))
    if state.phase is not Life.TRAINING:
        return state, ()
    return _with_halts(state, state.round.halts.take_offer(host, event))


def _take_joining(state: RunState, event: ev.HostJoined) -> Move:
    return _ask(state, ev.Asked(f"a host joins ({event.name})", regroups=True))


def _take_kept(state: RunState, event: ev.CheckpointKept) -> Move:
    return state, (do.NoteCheckpoint(event.step),)


def _take_silence(state: RunState, event: ev.HostSilent) -> Move:
    said = f"nothing came from host {event.host} ({event.name}) for {event.seconds:.0f} s"
    return state, (do.Note(said, wait=True),)


# ---- requests and time ---------------------------------------------------------------------------


def _ask(state: RunState, asked: ev.Asked) -> Move:
    """Take a request: ranks that run save, ranks that are to run will, and else nothing is lost."""
    phase = state.phase
    if phase is Life.TRAINING:
        return _with_halts(state, state.round.halts.ask(asked))
    if asked.again:
        return _end_by(state, early_end_of(asked))
    if phase is Life.FORKING or (phase in (Life.RESTING, Life.SAVING) and asked.ends):
        state, out = _wait(state, asked)
        return state, (*out, do.SetTimer(ev.BACK_OFF, 0.0)) if state.round.rests else out
    if phase in (Life.MEETING, Life.PLANNING) and asked.ends and not asked.regroups:
        return _end_by(state, end_of(asked))
    return state, ()


def _wait(state: RunState, event: Notice) -> Move:
    return replace(state, waiting=(*state.waiting, event)), ()


def _with_halts(state: RunState, answer: tuple[Halts, tuple[do.Instruction, ...]]) -> Move:
    halts, out = answer
    return replace(state, round=replace(state.round, halts=halts)), out


def _take_strike(state: RunState, event: ev.Struck) -> Move:
    fault = said.Reason(LAUNCHER, f"stopped by {event.by}.")
    if state.phase in (Life.FORKING, Life.TRAINING):
        return _blame(state, struck=fault), (do.KillRanks(),)
    return _end(state, do.End(do.FAILED, fault=fault))


def _take_launcher_failure(state: RunState, event: ev.LauncherFailed) -> Move:
    if state.phase in (Life.FORKING, Life.TRAINING):
        broken = state.round.blame.broken or event.fault
        return _blame(state, broken=broken), (do.KillRanks(),)
    return _end(state, do.End(do.FAILED, fault=event.fault))


def _take_time(state: RunState, event: ev.TimeIsUp) -> Move:
    if event.timer == ev.BACK_OFF and state.phase is Life.RESTING and state.round.rests:
        return _meet(state)
    if state.phase is not Life.TRAINING:
        return state, ()
    if event.timer == ev.LINGER:
        return state, (do.KillRanks(),)
    return _with_halts(state, state.round.halts.time_out(event.timer))


# ---- what comes after a round --------------------------------------------------------------------


def _take_parted(state: RunState, event: ev.Parted) -> Move:
    """Find the verdict where ranks here ended well, and what follows from it."""
    if state.phase is not Life.PARTING:
        return state, ()
    verdict = state.round.verdict or _find_verdict(state)
    if verdict is None and len(state.round.ended) == state.terms.num_ranks:
        verdict = Verdict(do.COMPLETE)
    if verdict is None:
        verdict = Verdict(
            do.FAILED, "", said.Reason(LAUNCHER, "ranks ended before their last step."), ev.DIED
        )
    state = replace(state, round=replace(state.round, verdict=verdict))
    if verdict.status != do.FAILED or verdict.fault is None:
        return _end_by(state, verdict)
    if state.terms.rolls_back and verdict.how == ev.RAISED and state.round.bad:
        find = do.FindStart(state.round.bad, rolls_back=True)
        return replace(state, phase=Life.RESTING), (find,)
    return _try_again(state)


def _try_again(state: RunState) -> Move:
    """Let ranks begin again, or give the run up."""
    verdict = state.round.verdict
    assert verdict and verdict.fault
    attempts = state.attempts.after(verdict.how, state.reached)
    if attempts:
        state = replace(state, phase=Life.RESTING, attempts=attempts)
        return state, (do.FindStart(state.round.bad or -1),)
    if state.terms.restarts and verdict.how != ev.STOPPED:
        return replace(state, phase=Life.SAVING), (do.Save(state.round.bad or -1),)
    return _end_by(state, verdict)


def _take_start(state: RunState, event: ev.StartFound) -> Move:
    """The state that ranks begin at is known on this host; several agree on it when they meet."""
    verdict = state.round.verdict
    if state.phase is not Life.RESTING or verdict is None or verdict.fault is None:
        return state, ()
    if event.place.source == ev.ROLLED_BACK:
        rollbacks = state.rollbacks.after(event.weights)
        if rollbacks is None:
            return _try_again(state)
        back = do.RollBack(verdict.fault, event.place.step, event.weights)
        state = replace(state, rollbacks=rollbacks, place=event.place, reached=event.place.step)
        state, more = _meet(state)
        return state, (back, *more)
    state = replace(state, place=event.place)
    out: tuple[do.Instruction, ...]
    if state.terms.may_change:
        named = _name_host(state, verdict.fault)
        state = replace(state, lost=named)
        out = (do.Note(f"{named.where}: {named.problem}"),)
    else:
        out = (_restart(state, verdict.fault, event.place),)
        state = replace(state, reached=event.place.step)
    if (wait_s := state.attempts.wait_s) and not state.waiting:
        state = replace(state, round=replace(state.round, rests=True))
        return state, (*out, do.SetTimer(ev.BACK_OFF, wait_s))
    state, more = _meet(state)
    return state, (*out, *more)


def _meet(state: RunState) -> Move:
    round_ = _new_round(state.terms, state.company, state.place)
    return replace(state, phase=Life.MEETING, round=round_), (do.Meet(),)


def _take_saved(state: RunState, event: ev.StateSaved) -> Move:
    verdict, terms = state.round.verdict, state.terms
    if state.phase is not Life.SAVING or verdict is None or verdict.fault is None:
        return state, ()
    if verdict.how == ev.DIED and 0 < terms.min_ranks < terms.num_ranks:
        return replace(state, phase=Life.PLANNING), (do.ReplanFewer(verdict.fault),)
    return _end_by(state, verdict)


def _take_planned(state: RunState, event: ev.NewPlan) -> Move:
    if state.phase is not Life.PLANNING:
        return state, ()
    terms = replace(state.terms, num_ranks=event.num_ranks)
    attempts = replace(state.attempts, in_row=0, raised=False, furthest=event.place.step)
    state = replace(
        state,
        terms=terms,
        attempts=attempts,
        rollbacks=Rollbacks(),
        place=event.place,
        reached=event.place.step,
    )
    return _meet(state)


def _take_no_plan(state: RunState, event: ev.NoPlan) -> Move:
    return _end(state, do.End(do.FAILED, fault=event.fault, refused=event.refused))


def _end_by(state: RunState, verdict: Verdict) -> Move:
    fault = verdict.fault and _name_host(state, verdict.fault)
    return _end(state, do.End(verdict.status, verdict.by, fault))


def _name_host(state: RunState, fault: said.Reason) -> said.Reason:
    """Return a fault with the host where it happened."""
    company = state.company
    if not company.names or fault.where.startswith("host"):
        return fault
    failure = state.round.blame.find(fault)
    host = failure.host if failure and failure.host >= 0 else company.number
    return replace(fault, where=f"{company.name(host)}, {fault.where}")


def _end(state: RunState, end: do.End) -> Move:
    return replace(state, phase=Life.OVER, waiting=()), (end,)


_OF_RANKS = (
    said.StepDone,
    said.Evaluated,
    said.FileWritten,
    said.Remarked,
    said.RankEnded,
    said.WeightsWritten,
    said.NumbersSeen,
)
# events of ranks here and of other hosts, whose number they need; the driver alone keeps others
_OF_A_HOST: Mapping[type[Notice], Callable[[RunState, Any, int], Move]] = {
    said.RankFailed: _take_rank_failure,
    ev.HostFailed: _take_host_failure,
    ev.HaltOffered: _take_offer,
}
_TABLE: Mapping[type[Notice], Callable[[RunState, Any], Move]] = {
    said.StepDone: _take_step,
    said.Evaluated: _take_evaluation,
    said.FileWritten: _take_file,
    said.Remarked: _take_remark,
    said.RankEnded: _take_end,
    said.BadStep: _take_bad_step,
    said.NumbersSeen: _take_numbers,
    ev.RanksForked: _take_forked,
    ev.RankDied: _take_death,
    ev.RanksGone: _take_ranks_gone,
    ev.HangSeen: _take_hang,
    ev.Frozen: _take_frozen,
    ev.Met: _take_met,
    ev.PlanWanted: _take_plan_wanted,
    ev.MeetingFailed: _take_meeting_failure,
    ev.AlreadyComplete: _take_complete,
    ev.HostGone: _take_gone,
    ev.HostSilent: _take_silence,
    ev.HostJoined: _take_joining,
    ev.CheckpointKept: _take_kept,
    ev.Parted: _take_parted,
    ev.Asked: _ask,
    ev.Struck: _take_strike,
    ev.TimeIsUp: _take_time,
    ev.StartFound: _take_start,
    ev.StateSaved: _take_saved,
    ev.NewPlan: _take_planned,
    ev.NoPlan: _take_no_plan,
    ev.LauncherFailed: _take_launcher_failure,
}
