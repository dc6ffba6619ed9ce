"""What comes after a round: how its ranks ended, and whether others begin."""

from __future__ import annotations

from dataclasses import replace

from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.supervise.life import events as ev
from flowrun.launcher.supervise.life import instructions as do
from flowrun.launcher.supervise.life.run_state import Life, Move, RunState, in_round, new_round
from flowrun.launcher.supervise.life.verdicts import LAUNCHER, Rollbacks, Verdict

_PART_S = 1.0  # for other hosts to end after a failure, before the ranks' store closes
NEVER_S = float("inf")


def part(state: RunState) -> Move:
    """Part from the other hosts, and let those know of a failure that do not."""
    blame, halts = state.round.blame, state.round.halts
    early, verdict = blame.is_early, _find_verdict(state)
    timers = tuple(do.SetTimer(timer, -1) for timer in (ev.GRACE, ev.ANSWER, ev.LINGER))
    state = replace(in_round(state, verdict=verdict), phase=Life.PARTING)
    if verdict is None or (verdict.status != do.FAILED and not early):
        return state, (*timers, do.LeaveRound(NEVER_S))
    asked, heard = halts.find_end(early), None
    if verdict.fault and not asked:
        heard = blame.describe(verdict.fault)
    elif verdict.status == do.STOPPED and halts.late:
        heard = ev.HostFailed(Reason(LAUNCHER, "stopped by Ctrl-C."), ev.LEFT)
    sends = (do.SendAll(heard),) if heard and state.company.others else ()
    return state, (*timers, *sends, do.LeaveRound(NEVER_S if asked and not early else _PART_S))


def _find_verdict(state: RunState) -> Verdict | None:
    """Return how the ranks ended; None: well."""
    blame, halts = state.round.blame, state.round.halts
    late = halts.late
    if not blame.broken:
        if asked := halts.find_end(blame.is_early):
            return asked
        if late and late.status == do.STOPPED:
            return late
    fault = blame.find_fault() or (late.fault if late else None)
    if fault is None:
        return None
    how = blame.find_how(fault)
    if halts.ending:
        how = ev.LEFT if halts.ending.regroups else ev.STOPPED
    return Verdict(do.FAILED, "", fault, how)


def conclude(state: RunState) -> Move:
    """All have parted: find the verdict where ranks here ended well, and what follows from it."""
    verdict = state.round.verdict or _find_verdict(state)
    if verdict is None and len(state.round.ended) == state.terms.num_ranks:
        verdict = Verdict(do.COMPLETE)
    if verdict is None:
        fault = Reason(LAUNCHER, "ranks ended before their last step.")
        verdict = Verdict(do.FAILED, "", fault, ev.DIED)
    state = in_round(state, verdict=verdict)
    if verdict.status != do.FAILED or verdict.fault is None:
        return end_by(state, verdict)
    if state.terms.rolls_back and verdict.how == ev.RAISED and state.round.bad:
        find = do.FindStart(state.round.bad, rolls_back=True)
        return replace(state, phase=Life.RESTING), (find,)
    return _try_again(state, verdict)


def _try_again(state: RunState, verdict: Verdict) -> Move:
    below = state.round.bad or -1
    if attempts := state.attempts.after(verdict.how, state.reached):
        return replace(state, phase=Life.RESTING, attempts=attempts), (do.FindStart(below),)
    if state.terms.restarts and verdict.how != ev.STOPPED:
        return replace(state, phase=Life.SAVING), (do.Save(below),)
    return end_by(state, verdict)


def begin_at(state: RunState, event: ev.StartFound) -> Move:
    """The state that ranks begin at is known on this host; several agree on it when they meet."""
    verdict, place = state.round.verdict, event.place
    assert verdict and verdict.fault
    if place.source == ev.ROLLED_BACK:
        rollbacks = state.rollbacks.after(event.weights)
        if rollbacks is None:
            return _try_again(state, verdict)
        back = do.RollBack(verdict.fault, place.step, event.weights)
        return meet(replace(state, rollbacks=rollbacks, place=place, reached=place.step), back)
    out: do.Instruction
    if state.terms.may_change:
        lost = name_host(state, verdict.fault)
        state = replace(state, place=place, lost=lost)
        out = do.Note(f"{lost.where}: {lost.problem}")
    else:
        state = replace(state, place=place, reached=place.step)
        out = restart(state, verdict.fault, place)
    if (wait_s := state.attempts.wait_s) and not state.waiting:
        return in_round(state, rests=True), (out, do.SetTimer(ev.BACK_OFF, wait_s))
    return meet(state, out)


def restart(state: RunState, fault: Reason, place: ev.StartPlace) -> do.Restart:
    return do.Restart(fault, place, state.attempts.in_row, state.attempts.limit)


def meet(state: RunState, *before: do.Instruction) -> Move:
    """Begin a round, after other instructions."""
    round_ = new_round(state.terms, state.company, state.place)
    return replace(state, phase=Life.MEETING, round=round_), (*before, do.Meet())


def give_up(state: RunState) -> Move:
    """What ranks left in memory is saved: plan for fewer, where they may be, or end."""
    verdict, terms = state.round.verdict, state.terms
    assert verdict and verdict.fault
    if verdict.how == ev.DIED and 0 < terms.min_ranks < terms.num_ranks:
        return replace(state, phase=Life.PLANNING), (do.ReplanFewer(verdict.fault),)
    return end_by(state, verdict)


def follow_plan(state: RunState, event: ev.NewPlan) -> Move:
    """Meet with other ranks."""
    step = event.place.step
    again = replace(state.attempts, in_row=0, raised=False, furthest=step)
    terms = replace(state.terms, num_ranks=event.num_ranks)
    state = replace(state, terms=terms, attempts=again, rollbacks=Rollbacks())
    return meet(replace(state, place=event.place, reached=step))


def end_by(state: RunState, verdict: Verdict) -> Move:
    """End by a verdict."""
    fault = verdict.fault and name_host(state, verdict.fault)
    return end(state, do.End(verdict.status, verdict.by, fault))


def end(state: RunState, how: do.End) -> Move:
    """Say the last word."""
    return replace(state, phase=Life.OVER, waiting=()), (how,)


def name_host(state: RunState, fault: Reason) -> Reason:
    """Return a fault with the host where it happened."""
    company = state.company
    if not company.names or fault.where.startswith("host"):
        return fault
    failure = state.round.blame.find(fault)
    host = failure.host if failure and failure.host >= 0 else company.number
    return replace(fault, where=f"{company.name(host)}, {fault.where}")
