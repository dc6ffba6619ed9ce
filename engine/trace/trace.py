"""Trace: what every rank did and why it waited, from the plan and the ranks' recorded events.

An event records when an act began and ended (drivers/recorder.py).  What the act waited for follows
from the plan: version v of a register is made by a known act, and a slot is free once a known act
has returned it.  The act waited for whichever ended last.  launcher/report/trace_file.py writes a
trace to a file; engine/trace/step_time.py sums it up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from flowrun.engine.actors.plan import Actor, Plan

INPUT, CREDIT, TURN, ITSELF = "input", "credit", "turn", "itself"
ActKey = tuple[int, int]  # actor, act


class What(StrEnum):
    """A kind of thing that a rank did.  All but FLIGHT and RUN are of its own thread, one after the
    other.
    """

    COMPUTE = "compute"  # it ran an act
    ISSUE = "issue"  # it started communication, or a reader's act
    FLIGHT = "flight"  # what was started has completed (begin = end)
    TAKE = "take"  # it stored what arrived
    SLEEP = "sleep"  # nothing could act until the named act in flight ended
    RUN = "run"  # a whole segment (actor and act are 0)


class TraceEvent(NamedTuple):
    """Something that a rank did from `begin` to `end`, in ns of the host's monotonic clock."""

    what: What
    actor: int
    act: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Need:
    """A condition of an act: another act of the same rank has ended (TURN: has begun).

    why: INPUT (a version to read), CREDIT (a slot to fill), TURN (its place in the order of
        collectives) or ITSELF (the actor's act before).
    register: the register of INPUT and CREDIT; the axis of TURN; -1 of ITSELF.
    of: that other act.
    """

    why: str
    register: int
    of: ActKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A recorded act; times are ns on the clock that all ranks share.

    end: when the act ended; for communication and readers, when it was no longer in flight.
    done: when the rank had handled that end.
    waited_for: the need that was met last; None if it was not recorded.
    ready: when that need was met.
    """

    rank: int
    actor: int
    act: int
    begin: int
    end: int
    done: int
    waited_for: Need | None = None
    ready: int | None = None


@dataclass(frozen=True)
class Needs:
    """The needs of each act of a plan, derived from the rates and slots of its registers."""

    plan: Plan

    def of(self, actor_id: int, act: int) -> Iterator[Need]:
        """Yield the needs of an act, without those that are met from the start."""
        actor = self.plan.actors[actor_id]
        acts = self.plan.acts_per_step(actor)
        if act:
            yield Need(ITSELF, -1, (actor_id, act - 1))
        for register in (self.plan.registers[k] for k in actor.inputs):
            version = act // (acts if register.per_step else 1)
            needed = version + 1 - register.initial  # versions to be made before
            if register.producer is not None and needed > 0:
                every = self._every(register.producer, register.per_step)
                yield Need(INPUT, register.id, (register.producer, needed * every - 1))
        for register in (self.plan.registers[k] for k in actor.outputs):
            version = register.initial + act // (acts if register.per_step else 1)
            returned = version + 1 - register.slots
            for reader in register.readers if returned > 0 else ():
                every = self._every(reader, register.per_step)
                yield Need(CREDIT, register.id, (reader, returned * every - 1))
        yield from self._turn(actor, act)

    def _every(self, actor: int, per_step: bool) -> int:
        return self.plan.acts_per_step(self.plan.actors[actor]) if per_step else 1

    def _turn(self, actor: Actor, act: int) -> Iterator[Need]:
        """Yield the need for the collective before this one in its group's order."""
        axis = self.plan.queue(actor)
        if axis < 0:
            return
        step, within = divmod(act, self.plan.acts_per_step(actor))
        before = self._before.get((actor.stage, axis, actor.id, within))
        if before is None or (step == 0 and before.earlier_step):
            return
        acts = self.plan.acts_per_step(self.plan.actors[before.actor])
        yield Need(TURN, axis, (before.actor, (step - before.earlier_step) * acts + before.act))

    @cached_property
    def _before(self) -> dict[tuple[int, int, int, int], _Before]:
        """(stage, axis, actor, act of the step) -> the collective before it in its group."""
        return {
            (*group, *each): _Before(*acts[place - 1], earlier_step=not place)
            for group, acts in self.plan.order
            for place, each in enumerate(acts)
        }


class _Before(NamedTuple):
    """An act of a step in a group's order of collectives; earlier_step: of the step before."""

    actor: int
    act: int
    earlier_step: bool


def step_number(plan: Plan, actor: int, act: int) -> int:
    """Return the step of the training, from 0, to which an act belongs."""
    return act // plan.acts_per_step(plan.actors[actor])


def replace_with_device_times(
    events: Iterable[TraceEvent], times: Mapping[ActKey, tuple[int, int]]
) -> list[TraceEvent]:
    """Return the events of a host as its asynchronous device saw them.

    times: act of compute -> (begin, end) on the device, ns.  Work of the host takes no time of the
    device; the rank sleeps where its device has nothing to compute.
    """
    out: list[TraceEvent] = []
    computed: list[TraceEvent] = []
    for event in events:
        if event.what == What.COMPUTE:
            begin, end = times[event.actor, event.act]
            computed.append(event._replace(begin=begin, end=end))
        elif event.what == What.ISSUE:
            out.append(event._replace(end=event.begin))
        elif event.what == What.TAKE:
            out.append(event._replace(begin=event.end))
        elif event.what != What.SLEEP:
            out.append(event)
    computed.sort(key=lambda event: event.begin)
    for one, other in pairwise(computed):
        if other.begin > one.end:
            out.append(TraceEvent(What.SLEEP, other.actor, other.act, one.end, other.begin))
    return [*out, *computed]


def keep_last_steps(plan: Plan, events: Collection[TraceEvent], steps: int) -> list[TraceEvent]:
    at = {e: step_number(plan, e.actor, e.act) for e in events if e.what != What.RUN}
    last = max(at.values(), default=0)
    return [event for event in events if at.get(event, last) > last - steps]


def build_slices(plan: Plan, rank: int, events: Iterable[TraceEvent]) -> tuple[Slice, ...]:
    """Return the acts that a rank recorded from beginning to end, in order of their beginning."""
    begun: dict[ActKey, int] = {}
    ended: dict[ActKey, int] = {}
    done: dict[ActKey, int] = {}
    for what, actor, act, begin, end in events:
        if what in (What.COMPUTE, What.ISSUE):
            begun[actor, act] = begin
        if what in (What.COMPUTE, What.FLIGHT):
            ended[actor, act] = end
        if what == What.TAKE:
            done[actor, act] = end
    needs = Needs(plan)
    slices = []
    for (actor, act), begin in sorted(begun.items(), key=lambda item: (item[1], item[0])):
        if (actor, act) in ended:
            end = ended[actor, act]
            ready, need = _find_last_need(needs.of(actor, act), begun, ended, done)
            handled = done.get((actor, act), end)
            slices.append(
                Slice(
                    rank=rank,
                    actor=actor,
                    act=act,
                    begin=begin,
                    end=end,
                    done=handled,
                    waited_for=need,
                    ready=ready,
                )
            )
    return tuple(slices)


def _find_last_need(
    needs: Iterable[Need],
    begun: Mapping[ActKey, int],
    ended: Mapping[ActKey, int],
    done: Mapping[ActKey, int],
) -> tuple[int | None, Need | None]:
    """Return when the last of some needs was met, and that need; Nones if none is recorded."""
    last: tuple[int | None, Need | None] = (None, None)
    for need in needs:
        time = begun.get(need.of) if need.why == TURN else done.get(need.of, ended.get(need.of))
        if time is not None and (last[0] is None or time > last[0]):
            last = time, need
    return last
