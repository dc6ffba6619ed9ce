"""communicators: the groups of ranks that talk to one another.

Each is a communicator of NCCL, which takes memory and time to make, and a stream of a pool of 32.
So there is one for each row of an axis, and one for each direction between two stages: all channels
between them share it, as both ends issue their messages in one order (rehearsal/launches.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from flowrun.engine.actors.plan import SEND, Actor, BoxWork, Plan, TransferWork

Members = tuple[int, ...]


def communicator_of(plan: Plan, actor: Actor) -> str:
    """Return the name of what an actor communicates over; "" if it does not."""
    match actor.work:
        case BoxWork() as work:
            return plan.axes[work.step.axis]
        case TransferWork(_, source, target):
            return f"stage {source} to {target}"
    return ""


def communicators_of(plan: Plan, stage: int) -> tuple[str, ...]:
    """Return the names of those of a rank of a stage, besides that of all ranks of the run."""
    return tuple(sorted({communicator_of(plan, a) for a in plan.stage_actors(stage)} - {""}))


def groups_of(plan: Plan) -> dict[str, tuple[Members, ...]]:
    """Return the groups of each communicator: each rank is in one of them at most."""
    ways = {name: _join(each) for name, each in ways_of(plan).items()}
    groups = {**rows_of(plan), **ways}
    return {name: tuple(sorted(each)) for name, each in sorted(groups.items())}


def ways_of(plan: Plan) -> dict[str, set[Members]]:
    """Return the (source, target) of all messages of each direction."""
    ways: dict[str, set[Members]] = {}
    for actor in plan.actors:
        if isinstance(actor.work, TransferWork) and actor.kind == SEND:
            ends = {(s.source, s.target) for sends in plan.routes(actor.work) for s in sends}
            ways.setdefault(communicator_of(plan, actor), set()).update(ends)
    return ways


def rows_of(plan: Plan) -> dict[str, set[Members]]:
    """Return the groups of the axes that have collectives."""
    rows: dict[str, set[Members]] = {}
    works = ((actor.stage, actor.work) for actor in plan.actors)
    for stage, axis in {(stage, w.step.axis) for stage, w in works if isinstance(w, BoxWork)}:
        rows.setdefault(plan.axes[axis], set()).update(plan.placements[stage].groups(axis))
    return rows


def _join(pairs: Iterable[Members]) -> set[Members]:
    """Join pairs that have a rank in common."""
    joined: set[Members] = set()
    for pair in sorted(pairs):
        touched = {group for group in joined if not set(pair).isdisjoint(group)}
        joined -= touched
        joined.add(tuple(sorted({*pair}.union(*touched))))
    return joined


def disjoint_calls(groups: Iterable[tuple[str, Members]]) -> list[list[tuple[str, Members]]]:
    """Pack named groups into calls; those of a call have no rank in common."""
    calls: list[tuple[set[int], list[tuple[str, Members]]]] = []
    for name, ranks in groups:
        free = (call for call in calls if call[0].isdisjoint(ranks))
        if (call := next(free, None)) is None:
            calls.append(call := (set(), []))
        call[0].update(ranks)
        call[1].append((name, ranks))
    return [named for _, named in calls]
