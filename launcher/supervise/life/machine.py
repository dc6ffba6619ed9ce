"""The machine of a run's life: `step(state, event) -> (state, instructions)`.  Pure: no process, no
file, no clock.  The driver feeds it with what happens, and its hands do what it asks (driver.py).

A run is a sequence of rounds.  In each, the hosts meet, ranks train, and have all gone; the hosts
part; and a verdict says what comes next.

    phase      what is awaited                       then
    MEETING    the hosts of a round                  Met: TRAINING; PlanWanted: PLANNING
    TRAINING   that all ranks of this host have gone RanksGone: PARTING
    PARTING    what other hosts have still to say    Parted: the verdict says which of those below
    FINISHING  files that the first host writes      Finished: OVER; HostGone: RESTING
    RESTING    the newest whole state, and a pause   StartFound, TimeIsUp: MEETING
    PLANNING   another plan                          NewPlan: MEETING
    OVER       nothing

LauncherFailed and AlreadyComplete lead to OVER; where ranks run, they are killed before.

What holds, for any order of events (`violations` in run_state.py, and tests/launcher/supervise):

**Nothing is lost.**  A checkpoint is completed once each rank has written its file, and a step
counts once its results are here.  What is asked while no ranks run waits for them, or ends the run
where nothing can be lost.
**Nobody waits for ever.**  A phase in which others are awaited has a timer, a limit of the hand, or
the watch; a gate that is frozen belongs to a request.
**There is one verdict.**  `End` comes once, and nothing follows it; a run is complete on the other
hosts once the first has written all of it.
**There is one first host.**  Who takes its place has a later epoch (hosts/hub.py), and with it the
lease of the run's folder and of its store.  One that was only silent finds them taken, and ends.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.life import events, instructions, next_round, verdicts
from flowrun.launcher.supervise.life.halts import Answer
from flowrun.launcher.supervise.life.run_state import Life, Move, RunState, in_round, new_round
from flowrun.launcher.supervise.life.verdicts import NUMBERS, Attempts, Terms

_LINGER_S = 2.0  # after a rank failed, those that wait for it in vain are killed
_FOR_ALL = (said.StepDone, said.Evaluated, said.FileWritten, said.WeightsWritten, said.RankEnded)
_UNHEARD = (*_FOR_ALL, said.Remarked, said.NumbersSeen)  # of ranks whose launcher is broken


def begin(terms: Terms, place: events.StartPoint, reached: int = 0) -> Move:
    """Return the state of a run that begins at a place, and what it does first."""
    reached = max(reached, place.step)
    state = RunState(
        terms=terms,
        phase=Life.MEETING,
        round=new_round(terms, events.Company(), place),
        attempts=Attempts(furthest=reached),
        place=place,
        reached=reached,
    )
    return state, (instructions.Meet(),)


def step(state: RunState, event: Notice) -> Move:
    """Take an event; return the state after it, and what is to be done."""
    if state.phase is Life.OVER:
        return state, ()
    host = -1
    if isinstance(event, events.FromHost):
        host, event = event.host, event.event
    here = state.phase is Life.TRAINING and host < 0 and state.company.others
    sends = (instructions.SendAll(event),) if here and _concerns_all(event) else ()
    if state.round.blame.broken and isinstance(event, _UNHEARD):
        return state, ()  # pipes are still emptied: no rank must block
    taken, out = _take_of_rank(state, event, host)
    return _kill_once(taken, (*sends, *out))


def _concerns_all(event: Notice) -> bool:
    """Return whether other hosts get an event of a rank of this host: all but remarks, and an error
    that is another rank's fault.
    """
    failed = isinstance(event, said.Failure) and not event.lost_peer
    return failed or isinstance(event, _FOR_ALL)


def _kill_once(state: RunState, out: tuple[instructions.Instruction, ...]) -> Move:
    """Let ranks be killed once, and only while they run."""
    others = tuple(each for each in out if not isinstance(each, instructions.KillRanks))
    if len(others) == len(out) or state.phase is not Life.TRAINING or state.round.blame.killed:
        return state, others
    return _blame(state, killed=True), (*others, instructions.KillRanks())


def _blame(state: RunState, **known: object) -> RunState:
    return in_round(state, blame=replace(state.round.blame, **known))  # type: ignore[arg-type]


def _take_of_rank(state: RunState, event: Notice, host: int) -> Move:
    """Take what a rank says, of this host (-1) or of another, and what goes to listeners."""
    match event:
        case said.StepDone():
            return replace(state, reached=event.step + 1), (instructions.Publish(event),)
        case said.Evaluated() | said.Remarked() | events.CheckpointKept():
            return state, (instructions.Publish(event),)
        case said.FileWritten() if not state.company.number:
            return _take_file(state, event)
        case said.RankEnded():
            return in_round(state, ended=state.round.ended | {event.rank}), ()
        case said.NumbersSeen():
            return _ask(state, events.Asked(NUMBERS))
        case said.Failure():
            return _fail(state, replace(event, host=host))
    return _take_of_process(state, event, host)


def _take_of_process(state: RunState, event: Notice, host: int) -> Move:
    """Take what happens to this host's processes and launcher, a request, or the end of a timer."""
    match event:
        case events.RankDied() if not (state.round.blame.killed or state.round.blame.death):
            return _linger(_blame(state, death=said.Reason(f"rank {event.rank}", event.how)))
        case events.RanksGone() if state.phase is Life.TRAINING:
            return next_round.part(state)
        case events.HangSeen():
            return _blame(state, hung=event.fault), (instructions.KillRanks(),)
        case events.Frozen():
            return _with_halts(state, state.round.halts.freeze(event.begun))
        case events.LauncherFailed():
            return _break(state, event)
        case events.Asked():
            return _ask(state, event)
        case events.TimeIsUp():
            return _take_time(state, event.timer)
    return _take_of_host(state, event, host)


def _take_of_host(state: RunState, event: Notice, host: int) -> Move:
    """Take what other hosts say, or what was awaited between two rounds."""
    match event:
        case events.Met():
            return _take_met(state, event.company)
        case events.AlreadyComplete():
            return next_round.end(state, instructions.End(instructions.THERE))
        case events.Finished():
            return next_round.finish(state)
        case events.HostGone() if not state.round.finished:
            fault = said.Reason(state.company.name(event.host), event.why)
            return _fail(state, said.Failure(fault, said.LEFT, host=event.host))
        case events.HaltOffered() if state.phase is Life.TRAINING:
            return _with_halts(state, state.round.halts.take_offer(host, event))
        case events.Parted() if state.phase is Life.PARTING:
            return next_round.conclude(state)
        case events.StartFound() if state.phase is Life.RESTING:
            return next_round.begin_at(state, event)
        case events.PlanWanted():
            return _take_plan_wanted(state, event)
        case events.NewPlan() if state.phase is Life.PLANNING:
            return next_round.follow_plan(state, event)
    return state, ()


def _take_file(state: RunState, event: said.FileWritten) -> Move:
    """A rank has written its file of a checkpoint; the last one completes it."""
    files = dict(state.round.files)
    there = {**files.pop(event.step, {}), event.name: event.written}
    out: tuple[instructions.Instruction, ...] = ()
    if len(there) < state.terms.num_ranks:
        files[event.step] = there
    else:
        out = (instructions.CompleteCheckpoint(event.step, there),)
        if state.company.others:
            out += (instructions.SendAll(events.CheckpointKept(event.step)),)
    return in_round(state, files=files), out


def _fail(state: RunState, failure: said.Failure) -> Move:
    """Note a failure: ranks that wait in vain are killed, at once if another host's failed."""
    if state.phase is Life.FINISHING and failure.host == 0 and failure.how == said.LEFT:
        return next_round.go_on_without_first(state, failure)
    if state.phase not in (Life.TRAINING, Life.PARTING):
        return state, ()
    state = _blame(state, failures=(*state.round.blame.failures, failure))
    state = in_round(state, bad=failure.bad or state.round.bad)
    if failure.host >= 0:
        return state, (instructions.KillRanks(),)
    return (state, ()) if failure.lost_peer else _linger(state)


def _linger(state: RunState) -> Move:
    if state.round.lingers:
        return state, ()
    return in_round(state, lingers=True), (instructions.SetTimer(events.LINGER, _LINGER_S),)


def _take_met(state: RunState, company: events.Company) -> Move:
    """Let ranks train: what was asked before is taken then."""
    waiting, place, out = state.waiting, state.place, next_round.restart(state, state.place)
    round_ = new_round(state.terms, company, place)
    state = replace(state, phase=Life.TRAINING, round=round_, reached=place.step)
    state, out = replace(state, lost=None, waiting=()), (*out, instructions.ForkRanks())
    for each in waiting:
        state, more = step(state, each)
        out += more
    return state, out


def _take_plan_wanted(state: RunState, event: events.PlanWanted) -> Move:
    place = events.StartPoint(event.step, "checkpoint" if event.step else "beginning", event.step)
    out = (*next_round.restart(state, place), instructions.ReplanHosts(event))
    return replace(state, phase=Life.PLANNING, lost=None), out


def _ask(state: RunState, asked: events.Asked) -> Move:
    """Take a request: ranks that run save, ranks that are to run will, and else nothing is lost."""
    phase = state.phase
    if phase is Life.TRAINING:
        return _with_halts(state, state.round.halts.ask(asked))
    if asked.again:
        return next_round.end_by(state, verdicts.early_end_of(asked))
    if phase is Life.RESTING and asked.ends:
        now = (instructions.SetTimer(events.BACK_OFF, 0.0),) if state.round.rests else ()
        return replace(state, waiting=(*state.waiting, asked)), now
    if phase in (Life.MEETING, Life.PLANNING, Life.FINISHING) and asked.ends and not asked.regroups:
        return next_round.end_by(state, verdicts.end_of(asked))
    return state, ()


def _with_halts(state: RunState, answer: Answer) -> Move:
    halts, out = answer
    return in_round(state, halts=halts), out


def _break(state: RunState, why: events.LauncherFailed) -> Move:
    """End a run at once; ranks that run are killed first."""
    if state.phase is Life.TRAINING:
        broken = state.round.blame.broken or why.fault
        return _blame(state, broken=broken), (instructions.KillRanks(),)
    failed = instructions.End(instructions.FAILED, "", why.fault, why.refused)
    return next_round.end(state, failed)


def _take_time(state: RunState, timer: str) -> Move:
    if timer == events.BACK_OFF and state.phase is Life.RESTING and state.round.rests:
        return next_round.meet(state)
    if state.phase is not Life.TRAINING:
        return state, ()
    if timer == events.LINGER:
        return state, (instructions.KillRanks(),)
    return _with_halts(state, state.round.halts.time_out(timer))
