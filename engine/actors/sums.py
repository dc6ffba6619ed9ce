"""sums: what a region adds up over the micro-batches of a step, and what may lie in any order.

Its program adds where the addend is made, so that no addend waits for the end of an act: it is
given the sum of the micro-batches before, and nothing with the first one.  Then the sum begins as
the addend itself, if that is memory of its own, or else as a copy.
"""

from __future__ import annotations

from collections import Counter

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.flow.update import ACCUMULATE
from flowrun.engine.ops.traits import has


def sums_of(plan: Plan, work: RegionWork) -> tuple[str, ...]:
    """Return the sums that a program is given after what it reads, in this order.

    None of a step with one micro-batch: its addends are what the step hands on.
    """
    if plan.micro_batches == 1:
        return ()
    sums = {op.makes[0] for op in work.ops if op.target == ACCUMULATE}
    return tuple(name for name in work.accumulates if name in sums and name in work.makes)


def find_reused_addends(plan: Plan, work: RegionWork) -> frozenset[str]:
    """Return the sums whose first addend is memory of its own that nothing else reads or keeps."""
    maker = {name: op for op in work.ops for name in op.makes}
    readers = _count_readers(work)
    written_over = {new for new, _ in work.overwrites}

    def is_own(name: str) -> bool:
        op = maker.get(name)
        if op is None or name in work.makes or readers[name] > 1:
            return False
        fresh = has(op.target, Trait.ALLOCATES) and name not in written_over
        return fresh or (has(op.target, Trait.ALIASES) and is_own(op.inputs[0]))

    return frozenset(n for n in sums_of(plan, work) if is_own(maker[n].inputs[0]))


def find_unordered_results(plan: Plan, work: RegionWork) -> frozenset[str]:
    """Return the ops whose one result may lie in any order: only sent, or only added up here."""
    maker = {op.makes[0]: op for op in work.ops if len(op.makes) == 1}
    added = sums_of(plan, work)
    sent = maker.keys() & work.sent
    addends = {
        op.inputs[0]
        for name, op in maker.items()
        if name in added or (op.target == ACCUMULATE and name in sent)
    }
    readers = _count_readers(work)
    alone = {name for name in addends if readers[name] == 1 and name not in work.makes}
    return frozenset(maker[name].name for name in (sent | alone) & maker.keys())


def _count_readers(work: RegionWork) -> Counter[str]:
    """Count the ops of the region that read each tensor."""
    return Counter(name for op in work.ops for name in set(op.inputs))
