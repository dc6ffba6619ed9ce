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

What holds, for any order of events (`violations` in run_state.py, and tests/launcher/supervise):

**Nothing is lost.**  A checkpoint is completed once each rank has written its file, and a step
counts once its results are here.  What is asked while no ranks run waits for them, or ends the run
where nothing can be lost.
**Nobody waits for ever.**  A phase in which others are awaited has a timer, a limit of the hand, or
the watch; a gate that is frozen belongs to a request.
**There is one verdict.**  `End` comes once, and nothing follows it.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.life import events as ev
from flowrun.launcher.supervise.life import instructions as do
from flowrun.launcher.supervise.life import next_round as after
from flowrun.launcher.supervise.life import verdicts
from flowrun.launcher.supervise.life.halts import Answer, Company
from flowrun.launcher.supervise.life.run_state import (
    Life,
    Move,
    RunState,
    Terms,
    in_round,
    new_round,
)
from flowrun.launcher.supervise.life.verdicts import LAUNCHER, NUMBERS, Attempts, Failure

_LINGER_S = 2.0  # after a rank failed, those that wait for it in vain are killed
_RANKS_HERE = (Life.FORKING, Life.TRAINING, Life.PARTING)
_FOR_ALL = (said.StepDone, said.Evaluated, said.FileWritten, said.RankEnded, said.BadStep)
_UNHEARD = (*_FOR_ALL, said.Remarked, said.NumbersSeen)  # of ranks whose launcher is broken


def begin(terms: Terms, place: ev.StartPlace, reached: int = 0) -> Move:
    """Return the state of a run that begins at a place, and what it does first."""
    company, reached = Company(may_change=terms.may_change), max(reached, place.step)
    attempts = Attempts(limit=terms.restarts, may_change=terms.may_change, furthest=reached)
    state = RunState(
        terms=terms,
        phase=Life.MEETING,
        company=company,
        round=new_round(terms, company, place),
        attempts=attempts,
        place=place,
        reached=reached,
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
    if state.round.blame.broken and isinstance(event, _UNHEARD):
        return state, ()  # pipes are still emptied: no rank must block
    taken, out = _take_of_rank(state, event, host)
    return _kill_once(state, taken, (*sends, *out))


def _concerns_all(event: Notice) -> bool:
    """Return whether other hosts get an event of a rank of this host: all but remarks, a rank's own
    weights, and an error that is another rank's fault.
    """
    failed = isinstance(event, said.RankFailed) and not event.lost_peer
    return failed or isinstance(event, _FOR_ALL)


def _kill_once(before: RunState, state: RunState, out: tuple[do.Instruction, ...]) -> Move:
    """Let ranks be killed once, and only while they run; those that are being forked, when they
    do.
    """
    others = tuple(each for each in out if not isinstance(each, do.KillRanks))
    if len(others) == len(out) or state.phase not in (Life.FORKING, Life.TRAINING):
        return state, others
    begins = before.phase is Life.FORKING and state.phase is Life.TRAINING
    kills = state.phase is Life.TRAINING and (begins or not before.round.blame.killed)
    return _blame(state, killed=True), (*others, do.KillRanks()) if kills else others


def _blame(state: RunState, **known: object) -> RunState:
    return in_round(state, blame=replace(state.round.blame, **known))  # type: ignore[arg-type]


def _take_of_rank(state: RunState, event: Notice, host: int) -> Move:
    """Take what a rank says, of this host (-1) or of another."""
    match event:
        case said.StepDone():
            return replace(state, reached=event.step + 1), (do.Publish(event),)
        case said.Evaluated():
            return state, (do.Publish(event),)
        case said.FileWritten() if not state.company.number:
            return _take_file(state, event)
        case said.Remarked():
            return state, (do.Note(event.text),)
        case said.RankEnded():
            return in_round(state, ended=state.round.ended | {event.rank}), ()
        case said.BadStep():
            return in_round(state, bad=event.steps), ()
        case said.NumbersSeen():
            return _ask(state, ev.Asked(NUMBERS))
        case said.RankFailed():
            return _fail(state, Failure(event.fault, ev.RAISED, event.lost_peer, host))
    return _take_of_process(state, event, host)


def _take_of_process(state: RunState, event: Notice, host: int) -> Move:
    match event:
        case ev.RanksForked() if state.phase is Life.FORKING:
            return _take_forked(state, event.place)
        case ev.RankDied() if not (state.round.blame.killed or state.round.blame.death):
            return _linger(_blame(state, death=Reason(f"rank {event.rank}", event.how)))
        case ev.RanksGone() if state.phase is Life.TRAINING:
            return after.part(state)
        case ev.HangSeen():
            return _blame(state, hung=event.fault), (do.KillRanks(),)
        case ev.Frozen():
            return _with_halts(state, state.round.halts.freeze(event.begun))
        case ev.Struck():
            return _break(state, "struck", Reason(LAUNCHER, f"stopped by {event.by}."))
        case ev.LauncherFailed():
            return _break(state, "broken", state.round.blame.broken or event.fault)
        case ev.Asked():
            return _ask(state, event)
        case ev.TimeIsUp():
            return _take_time(state, event.timer)
    return _take_of_host(state, event, host)


def _take_of_host(state: RunState, event: Notice, host: int) -> Move:
    match event:
        case ev.Met():
            return _take_met(state, event)
        case ev.MeetingFailed() | ev.NoPlan():
            return after.end(state, do.End(do.FAILED, "", event.fault, event.refused))
        case ev.AlreadyComplete():
            return after.end(state, do.End(do.THERE))
        case ev.HostGone():
            fault = Reason(f"host {event.host} ({event.name})", event.why)
            return _fail(state, Failure(fault, ev.LEFT, host=event.host))
        case ev.HostFailed():
            return _fail(state, Failure(event.fault, event.how, event.lost_peer, host))
        case ev.HostSilent():
            name = f"host {event.host} ({event.name})"
            return state, (do.Note(f"nothing came from {name} for {event.seconds:.0f} s", True),)
        case ev.HostJoined():
            return _ask(state, ev.Asked(f"a host joins ({event.name})", regroups=True))
        case ev.HaltOffered() if state.phase is Life.FORKING:
            return _wait(state, ev.FromHost(host, event))
        case ev.HaltOffered() if state.phase is Life.TRAINING:
            return _with_halts(state, state.round.halts.take_offer(host, event))
        case ev.CheckpointKept():
            return state, (do.NoteCheckpoint(event.step),)
    return _take_between(state, event)


def _take_between(state: RunState, event: Notice) -> Move:
    match event:
        case ev.Parted() if state.phase is Life.PARTING:
            return after.conclude(state)
        case ev.StartFound() if state.phase is Life.RESTING:
            return after.begin_at(state, event)
        case ev.StateSaved() if state.phase is Life.SAVING:
            return after.give_up(state)
        case ev.PlanWanted():
            return _take_plan_wanted(state, event)
        case ev.NewPlan() if state.phase is Life.PLANNING:
            return after.follow_plan(state, event)
    return state, ()


def _take_file(state: RunState, event: said.FileWritten) -> Move:
    """A rank has written its file of a checkpoint; the last one completes it."""
    files = dict(state.round.files)
    there = {**files.pop(event.step, {}), event.name: event.written}
    out: tuple[do.Instruction, ...] = ()
    if len(there) < state.terms.num_ranks:
        files[event.step] = there
    else:
        out = (do.CompleteCheckpoint(event.folder, event.step, there),)
        if state.company.others:
            out += (do.SendAll(ev.CheckpointKept(event.step)),)
    return in_round(state, files=files), out


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
    return in_round(state, lingers=True), (do.SetTimer(ev.LINGER, _LINGER_S),)


def _take_forked(state: RunState, place: ev.StartPlace) -> Move:
    """Ranks run: what was asked before is taken now."""
    out: tuple[do.Instruction, ...] = (do.KillRanks(),) if state.round.blame.killed else ()
    waiting, halts = state.waiting, replace(state.round.halts, saved=place.saved)
    state = replace(in_round(state, halts=halts), place=place, reached=place.step)
    state = replace(state, phase=Life.TRAINING, waiting=())
    for each in waiting:
        state, more = step(state, each)
        out += more
    return state, out


def _take_met(state: RunState, event: ev.Met) -> Move:
    company = replace(state.company, number=event.number, names=event.names, shared=event.shared)
    round_, out = new_round(state.terms, company, state.place), _begin_again(state, state.place)
    state = replace(state, phase=Life.FORKING, company=company, round=round_, lost=None)
    return state, (*out, do.ForkRanks())


def _take_plan_wanted(state: RunState, event: ev.PlanWanted) -> Move:
    place = ev.StartPlace(event.step, "checkpoint" if event.step else "beginning", event.step)
    plan = do.ReplanHosts(event.num_hosts, event.step)
    return replace(state, phase=Life.PLANNING, lost=None), (*_begin_again(state, place), plan)


def _begin_again(state: RunState, place: ev.StartPlace) -> tuple[do.Instruction, ...]:
    return (after.restart(state, state.lost, place),) if state.lost else ()


def _ask(state: RunState, asked: ev.Asked) -> Move:
    """Take a request: ranks that run save, ranks that are to run will, and else nothing is lost."""
    phase = state.phase
    if phase is Life.TRAINING:
        return _with_halts(state, state.round.halts.ask(asked))
    if asked.again:
        return after.end_by(state, verdicts.early_end_of(asked))
    if phase is Life.FORKING or (phase in (Life.RESTING, Life.SAVING) and asked.ends):
        state, out = _wait(state, asked)
        return state, (*out, do.SetTimer(ev.BACK_OFF, 0.0)) if state.round.rests else out
    if phase in (Life.MEETING, Life.PLANNING) and asked.ends and not asked.regroups:
        return after.end_by(state, verdicts.end_of(asked))
    return state, ()


def _wait(state: RunState, event: Notice) -> Move:
    return replace(state, waiting=(*state.waiting, event)), ()


def _with_halts(state: RunState, answer: Answer) -> Move:
    halts, out = answer
    return in_round(state, halts=halts), out


def _break(state: RunState, why: str, fault: Reason) -> Move:
    """End a run at once; ranks that run are killed first."""
    if state.phase in (Life.FORKING, Life.TRAINING):
        return _blame(state, **{why: fault}), (do.KillRanks(),)
    return after.end(state, do.End(do.FAILED, fault=fault))


def _take_time(state: RunState, timer: str) -> Move:
    if timer == ev.BACK_OFF and state.phase is Life.RESTING and state.round.rests:
        return after.meet(state)
    if state.phase is not Life.TRAINING:
        return state, ()
    if timer == ev.LINGER:
        return state, (do.KillRanks(),)
    return _with_halts(state, state.round.halts.time_out(timer))
