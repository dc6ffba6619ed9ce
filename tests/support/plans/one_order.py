"""Plans as they are on CUDA: all communication of a rank has one order."""

from collections.abc import Callable
from dataclasses import replace

from flowrun.engine.actors.plan import Actor, Plan
from flowrun.engine.rehearsal.rehearsal import rehearse


def in_one_order(
    plan: Plan, seconds: Callable[[Actor], float] | None = None, skip_repeats: bool = True
) -> Plan:
    """The same plan, rehearsed so."""
    plan = replace(plan, one_order=True, order=(), due=(), ended=())
    return rehearse(plan, seconds, skip_repeats=skip_repeats).fix(plan)
