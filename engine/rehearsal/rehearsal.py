"""rehearse: the plan executed before anything starts, by the same protocol, on a virtual clock
(clock.py).

Yields: a proof that the plan ends (else PlanError with the wait cycle, deadlock.py), the order of
collectives in each group, step time and bubble, peak bytes, and the timeline.

What repeats is run once (period.py): in the middle of a step of many micro-batches, and when a step
has left everything as the one before it did.  All that follows is then known, to the last bit, so
that the proof and the numbers are those of the whole run.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flowrun.engine.actors.plan import Actor, Counts, Orders, Plan
from flowrun.engine.rehearsal.clock import Clock
from flowrun.engine.rehearsal.clock_state import Event
from flowrun.engine.rehearsal.launches import check_line

STEPS = 4  # at most: from cold to steady, and one after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The seconds and bytes that are foreseen of a plan.

    step_s: seconds of a step in the steady state.
    first_step_s: seconds of the first step, before the pipeline is full.
    bubble: share of a step in which a rank of the stage does not compute, by stage.
    peak_bytes: largest memory of one rank, by stage.
    bound_bytes: the same with every stash full, which early or late messages may cause.
    sent_bytes: bytes that all ranks send in a step.
    first_step: the timeline of the first step.
    order, due, ended: see Plan.
    act_bytes: most bytes of a rank, without messages, at any act of an actor, by actor.
    """

    step_s: float
    first_step_s: float
    bubble: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bound_bytes: tuple[int, ...]
    sent_bytes: float
    first_step: tuple[Event, ...]
    order: Orders
    due: Counts = ()
    ended: Counts = ()
    act_bytes: Mapping[int, int] = field(default_factory=dict)

    def fix(self, plan: Plan) -> Plan:
        """Return a plan with the order that was found."""
        return replace(plan, order=self.order, due=self.due, ended=self.ended)


def rehearse(
    plan: Plan,
    seconds: Callable[[Actor], float] | None = None,
    *,
    skip_repeats: bool = True,
    count_memory: bool = True,
) -> Rehearsal:
    """Run a cold step or two, fix the order of collectives, then run again to see a steady step.

    seconds: cost of one act, if not the foreseen one (unit times in tests).
    skip_repeats: what repeats is run once.  count_memory: if not, there are no bytes of ranks.
    Raises PlanError if the plan cannot end.
    """
    cost = seconds or (lambda actor: actor.seconds)
    cold = Clock(plan, cost, steps=1, skip_repeats=skip_repeats)
    cold.run()
    shown = cold
    if plan.schedule.orders and (plan.blocking or plan.one_order):
        # the turns of a cold step would hold up all others
        shown = Clock(plan, cost, steps=2, skip_repeats=skip_repeats)
        shown.run()
    order, due, ended = shown.order()
    ordered = replace(plan, order=order, due=due)
    warm = Clock(
        ordered,
        cost,
        steps=STEPS,
        skip_repeats=skip_repeats,
        endless=True,
        count_memory=count_memory,
    )
    warm.run()
    check_line(ordered)
    busy = [0.0] * len(plan.placements)
    acts, computes = cold.table.acts, cold.table.computes
    first = tuple(event for event in cold.state.events if event.act < acts[event.actor])
    for event in first:
        if computes[event.actor]:
            busy[event.stage] += event.end - event.start
    sent = sum(actor.sent_bytes * plan.acts_per_step(actor) for actor in plan.actors)
    step_s = warm.step_s
    return Rehearsal(
        step_s=step_s,
        first_step_s=cold.state.now,
        bubble=tuple(max(0.0, 1 - b / step_s) if step_s else 0.0 for b in busy),
        peak_bytes=tuple(memory.peak for memory in warm.state.memory),
        bound_bytes=tuple(memory.bound for memory in warm.state.memory),
        act_bytes=ChainMap(*(memory.of_act for memory in warm.state.memory)),
        sent_bytes=sent,
        first_step=first,
        order=order,
        due=due,
        ended=ended,
    )
