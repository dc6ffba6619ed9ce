"""launches: why no order of launches stops a run.

A GPU serves launches in order.  A receive or collective that it has started holds SMs until the
other ranks come (nccl issues 1025, 689).  Streams come from a pool of 32, again and again, and
share 8 hardware queues; what is launched behind such an act waits, whether or not it needs it.

The invariant: all communication of all ranks stands in one line.  Both ends of a message, and all
members of a collective, are one place in it; no act needs what comes later; each rank launches its
part in that order.  The clock makes the line: it plays a step in which each rank issues what it
may, and writes an act down when its last end has come (ClockState.record); what it needed had ended
by then.  Steps stand one behind the other, for nothing needs what a later step makes.

So no run stops, at any speed of compute and in any room.  Of all communication that has not ended
take the first in the line.  All before it has ended, so on each of its ranks it is next, and no
launch waits.  What it reads, and the slots that it fills, follow from compute that needs nothing
later.  So all its ranks launch it, and it ends.  Where compute waits on the device for a collective
(Plan.ended), that was launched before it, and is an earlier one.

Two things are tried of each plan.  The rehearsal plays it to its end in its order: on one rank no
act needs what comes later there.  `check_line` finds the line again from the orders of the ranks.

A receive reads nothing: launched long before its message it would hold SMs until then.  So a place
of the line knows how many acts of compute had ended there (Plan.due): a receive is launched when as
many have begun, for on the device it waits for those that were launched before it.
"""

from __future__ import annotations

from flowrun.engine.actors.deadlock import name_actor
from flowrun.engine.actors.plan import COMMUNICATION, Plan, TransferWork
from flowrun.engine.errors import PlanError


def check_line(plan: Plan) -> None:
    """Raise PlanError unless the orders of a plan in one order are parts of one line that has all
    acts.
    """
    if not plan.one_order:
        return
    orders = {stage: iter(order) for (stage, _), order in plan.order}
    waiting: dict[tuple[int, int], int] = {}  # channel and act -> the end that waits there
    ready = [*orders]
    while ready:
        stage = ready.pop()
        for actor, act in orders[stage]:
            work = plan.actors[actor].work
            if isinstance(work, TransferWork):
                other = waiting.pop((work.channel, act), None)
                if other is None:
                    waiting[work.channel, act] = actor
                    break
                ready.append(plan.actors[other].stage)
    communication = [actor for actor in plan.actors if actor.kind in COMMUNICATION]
    missing = sum(map(plan.acts_per_step, communication)) - sum(len(acts) for _, acts in plan.order)
    if waiting or missing:
        who = [plan.actors[k] for k in waiting.values()] or communication
        names = ", ".join(name_actor(plan, actor.id) for actor in who)
        raise PlanError("plan", f"the run would stop: launches are served in order; {names} wait.")
