"""causes: what each act of a drawn step waited for, and the longest chain of such waits.

An act begins when the last of its needs is met (trace.Needs), when the rank has computed the act
before it, and when the link has carried the message before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flowrun.engine.actors.plan import Plan, TransferWork
from flowrun.engine.rehearsal.clock_state import Event
from flowrun.engine.trace.trace import TURN, ActKey, Needs

COMPUTE, LINK = "compute", "link"  # besides the reasons of trace.Need


class Cause(NamedTuple):
    """The cause of an act is what it waited for last.

    of: the place of that act among the events.  why: INPUT, CREDIT, TURN or ITSELF of trace.py,
    COMPUTE (the rank computed it) or LINK (it was under way on the same link).  register: of INPUT
    and CREDIT.
    """

    of: int
    why: str
    register: int = -1


def find_causes(plan: Plan, events: Sequence[Event]) -> list[Cause | None]:
    """Return the cause of each act; None: it could begin with the step.

    events: of a step, in the order in which they began.
    """
    needs, at = Needs(plan), {(e.actor, e.act): k for k, e in enumerate(events)}
    before: dict[tuple[int, int], int] = {}  # (stage, -1 or level of a link) -> the act before
    found: list[Cause | None] = []
    for k, event in enumerate(events):
        actor = plan.actors[event.actor]
        sides = [(event.actor, event.act)]
        if isinstance(actor.work, TransferWork):
            sides = [(end, event.act) for end in plan.channel_ends[actor.work.channel]]
        causes = [each for each in _met(needs, events, at, sides) if each[1].of != k]
        if not actor.runs_in_thread:
            line = event.stage, -1 if actor.computes else actor.level
            if (last := before.get(line)) is not None:
                why = COMPUTE if actor.computes else LINK
                causes.append((events[last].end, Cause(last, why)))
            before[line] = k
        in_time = (each for each in causes if each[0] <= event.start)
        latest = max(in_time, key=lambda each: each[0], default=None)
        found.append(latest[1] if latest else None)
    return found


def _met(
    needs: Needs, events: Sequence[Event], at: dict[ActKey, int], sides: Sequence[ActKey]
) -> Iterator[tuple[float, Cause]]:
    """Yield the needs of an act, of a message of both ends, and when each was met."""
    for side in sides:
        for need in needs.of(*side):
            if (of := at.get(need.of)) is not None:
                time = events[of].start if need.why == TURN else events[of].end
                yield time, Cause(of, need.why, need.register if need.why != TURN else -1)


def longest_chain(
    events: Sequence[Event], causes: Sequence[Cause | None]
) -> Iterator[tuple[int, float]]:
    """Yield, from the last act of the step back to its first, each act that the end of the step
    waited for, and the seconds of the step that it took.
    """
    place = max(range(len(events)), key=lambda k: events[k].end, default=None)
    until = events[place].end if place is not None else 0.0
    while place is not None:
        event, cause = events[place], causes[place]
        yield place, max(0.0, until - event.start)
        until = min(until, event.start)
        place = cause.of if cause else None
