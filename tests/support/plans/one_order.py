"""Plans as they are on CUDA: all communication of a rank has one order."""

from dataclasses import replace

from flowrun.engine.actors.plan import Plan
from flowrun.engine.rehearsal.rehearsal import rehearse


def in_one_order(plan: Plan) -> Plan:
    """The same plan, rehearsed so."""
    plan = replace(plan, one_order=True, order=(), due=())
    rehearsal = rehearse(plan)
    return replace(plan, order=rehearsal.order, due=rehearsal.due)
