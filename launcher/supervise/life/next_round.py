"""What comes after a round: how its ranks ended, and whether others begin."""

from __future__ import annotations

from dataclasses import replace

from flowrun.launcher.ranks.rank_events import CANCELLED, DIED, LEFT, RAISED, Failure, Reason
from flowrun.launcher.supervise.life import events, instructions
from flowrun.launcher.supervise.life.instructions import End, say
from flowrun.launcher.supervise.life.run_state import Life, Move, RunState, in_round, new_round
from flowrun.launcher.supervise.life.verdicts import LAUNCHER, Rollbacks

_PART_S = 1.0  # for other hosts to end after a failure, before the ranks' store closes
NEVER_S = float("inf")


def part(state: RunState) -> Move:
    """Part from the other hosts, and let those know of a failure that do not."""
    blame, halts = state.round.blame, state.round.halts
    early, verdict = blame.is_early, _find_verdict(state)
    timers = tuple(
        instructions.SetTimer(timer, -1) for timer in (events.GRACE, events.ANSWER, events.LINGER)
    )
    state = replace(in_round(state, verdict=verdict), phase=Life.PARTING)
    if verdict is None or (verdict.status != instructions.FAILED and not early):
        return state, (*timers, instructions.LeaveRound(NEVER_S))
    asked, heard = halts.find_end(early), None
    if verdict.fault and not asked:
        heard = blame.describe(verdict.fault)
    elif verdict.status == instructions.STOPPED and halts.late:
        heard = Failure(Reason(LAUNCHER, "stopped by Ctrl-C."), LEFT)
    sends = (instructions.SendAll(heard),) if heard and state.company.others else ()
    leave = instructions.LeaveRound(NEVER_S if asked and not early else _PART_S)
    return state, (*timers, *sends, leave)


def _find_verdict(state: RunState) -> End | None:
    """Return how the ranks ended; None: well."""
    blame, halts = state.round.blame, state.round.halts
    late = halts.late
    if not blame.broken:
        if asked := halts.find_end(blame.is_early):
            return asked
        if late and late.status == instructions.STOPPED:
            return late
    fault = blame.find_fault() or (late.fault if late else None)
    if fault is None:
        return None
    how = blame.find_how(fault)
    if halts.ending:
        how = LEFT if halts.ending.regroups else CANCELLED
    return End(instructions.FAILED, fault=fault, how=how)


def conclude(state: RunState) -> Move:
    """All have parted: find the verdict where ranks here ended well, and what follows from it."""
    verdict = state.round.verdict or _find_verdict(state)
    if verdict is None and len(state.round.ended) == state.terms.num_ranks:
        verdict = End(instructions.COMPLETE)
    if verdict is None:
        fault = Reason(LAUNCHER, "ranks ended before their last step.")
        verdict = End(instructions.FAILED, fault=fault, how=DIED)
    state = in_round(state, verdict=verdict)
    awaits_first = state.company.number > 0 and not state.round.finished
    if verdict.status == instructions.COMPLETE and awaits_first:
        return replace(state, phase=Life.FINISHING), ()
    if verdict.status != instructions.FAILED or verdict.fault is None:
        return end_by(state, verdict)
    if state.terms.rolls_back and verdict.how == RAISED and state.round.bad:
        return replace(state, phase=Life.RESTING), (instructions.FindStart(rolls_back=True),)
    return _try_again(state, verdict)


def finish(state: RunState) -> Move:
    """The first host has written all."""
    state = in_round(state, finished=True)
    verdict = state.round.verdict
    return end_by(state, verdict) if state.phase is Life.FINISHING and verdict else (state, ())


def go_on_without_first(state: RunState, failure: Failure) -> Move:
    """The first host is lost before it has written all: others do its last steps again."""
    verdict = End(instructions.FAILED, fault=failure.fault, how=failure.how)
    blame = replace(state.round.blame, failures=(*state.round.blame.failures, failure))
    return _try_again(in_round(state, verdict=verdict, blame=blame), verdict)


def _try_again(state: RunState, verdict: End) -> Move:
    """Begin again; else save what is in memory, and plan for fewer ranks if they may be, or end."""
    terms = state.terms
    if attempts := state.attempts.after(verdict.how, state.reached, terms):
        return replace(state, phase=Life.RESTING, attempts=attempts), (instructions.FindStart(),)
    if not terms.restarts or verdict.how == CANCELLED:
        return end_by(state, verdict)
    save = instructions.Save()
    if verdict.how == DIED and 0 < terms.min_ranks < terms.num_ranks:
        assert verdict.fault
        plan = instructions.ReplanFewer(verdict.fault)
        return replace(state, phase=Life.PLANNING), (save, plan)
    state, out = end_by(state, verdict)
    return state, (save, *out)


def begin_at(state: RunState, event: events.StartFound) -> Move:
    """The state that ranks begin at is known on this host; several agree on it when they meet."""
    verdict, place = state.round.verdict, event.place
    assert verdict and verdict.fault
    if place.source == events.ROLLED_BACK:
        rollbacks = state.rollbacks.after(place.weights)
        if rollbacks is None:
            return _try_again(state, verdict)
        back = instructions.Restart(verdict.fault, place)
        return meet(replace(state, rollbacks=rollbacks, place=place, reached=place.step), back)
    out: tuple[instructions.Instruction, ...]
    state = replace(state, place=place)
    if state.terms.may_change:
        lost = name_host(state, verdict.fault)
        state, out = replace(state, lost=lost), (say(f"{lost.where}: {lost.problem}"),)
    else:
        out = restart(replace(state, lost=verdict.fault), place)
        state = replace(state, reached=place.step)
    if (wait_s := state.attempts.wait_s) and not state.waiting:
        return in_round(state, rests=True), (*out, instructions.SetTimer(events.BACK_OFF, wait_s))
    return meet(state, *out)


def restart(state: RunState, place: events.StartPoint) -> tuple[instructions.Instruction, ...]:
    """Return the instruction to write down why ranks begin again, if that is still to be done."""
    return (instructions.Restart(state.lost, place),) if state.lost else ()


def meet(state: RunState, *before: instructions.Instruction) -> Move:
    """Begin a round, after other instructions."""
    round_ = new_round(state.terms, state.company, state.place)
    return replace(state, phase=Life.MEETING, round=round_), (*before, instructions.Meet())


def follow_plan(state: RunState, event: events.NewPlan) -> Move:
    """Meet with other ranks."""
    step = event.place.step
    again = replace(state.attempts, in_row=0, raised=False, furthest=step)
    terms = replace(state.terms, num_ranks=event.num_ranks)
    state = replace(state, terms=terms, attempts=again, rollbacks=Rollbacks())
    return meet(replace(state, place=event.place, reached=step))


def end_by(state: RunState, verdict: End) -> Move:
    fault = verdict.fault and name_host(state, verdict.fault)
    return end(state, replace(verdict, fault=fault))


def end(state: RunState, how: End) -> Move:
    return replace(state, phase=Life.OVER, waiting=()), (how,)


def name_host(state: RunState, fault: Reason) -> Reason:
    """Return a fault with the host where it happened."""
    company = state.company
    if not company.names or fault.where.startswith("host"):
        return fault
    failure = state.round.blame.find(fault)
    host = failure.host if failure and failure.host >= 0 else company.number
    return replace(fault, where=f"{company.name(host)}, {fault.where}")
