"""Trace: what every rank did and why it waited, from the plan and the ranks' notes.

A note tells when an act began and ended (drivers/recorder.py).  What it waited for follows from the
plan: version v of a register is made by a known act, and a slot is free once a known act has
returned it.  Whichever ended last is what the act waited for.  Foreseen acts are the rehearsal's.
Written as a file by launcher/report/trace_file.py, summed up by engine/trace/step_time.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from flowrun.engine.actors.plan import Actor, BoxWork, Plan

COMPUTE, ISSUE, FLIGHT, TAKE, SLEEP, RUN = "compute", "issue", "flight", "take", "sleep", "run"
INPUT, CREDIT, TURN, ITSELF = "input", "credit", "turn", "itself"
ActKey = tuple[int, int]  # actor, act


class TraceEvent(NamedTuple):
    """Something that a rank did, from `begin` to `end`, ns of the host's monotonic clock.

    COMPUTE: an act.  ISSUE: began communication, or a reader's act.  FLIGHT: what was begun is done
    (begin = end).  TAKE: stored what arrived.  SLEEP: nothing to do, up to the end of the act under
    way that is named.  RUN: from the first to the last of a segment (actor and act are 0).  All but
    FLIGHT and RUN are the rank's own thread, one after the other.
    """

    what: str
    actor: int
    act: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Need:
    """What an act needs before it can begin: the end of another act of the same rank; TURN: its
    beginning.

    register: of INPUT (to read) and CREDIT (a slot to fill); TURN: the axis.
    """

    why: str
    register: int
    of: ActKey


@dataclass(frozen=True, slots=True)
class Slice:
    """One act, times in ns on the clock of all ranks.

    end: of the act; of communication and of readers when it was under way no more.  done: when the
    rank had told its actors so.  waited_for: the last thing that it needed, None if that was not
    recorded; ready: when that was there.
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
    """What each act of a plan needs, by the rates and slots of its registers."""

    plan: Plan

    def of(self, actor_id: int, act: int) -> Iterator[Need]:
        """Everything that an act needs, but for what is there from the start."""
        actor = self.plan.actors[actor_id]
        acts = self.plan.acts_per_step(actor)
        if act:
            yield Need(ITSELF, -1, (actor_id, act - 1))
        for register in (self.plan.registers[k] for k in actor.inputs):
            version = act // (acts if register.per_step else 1)
            made = version + 1 - register.initial  # versions to be made before
            if register.producer is not None and made > 0:
                every = self._every(register.producer, register.per_step)
                yield Need(INPUT, register.id, (register.producer, made * every - 1))
        for register in (self.plan.registers[k] for k in actor.outputs):
            version = register.initial + act // (acts if register.per_step else 1)
            returned = version + 1 - register.slots
            for reader in register.readers if returned > 0 else ():
                every = self._every(reader, register.per_step)
                yield Need(CREDIT, register.id, (reader, returned * every - 1))
        yield from self._turn(actor, act)

    def _every(self, actor: int, per_step: bool) -> int:
        """Acts of an actor to a version of a register."""
        return self.plan.acts_per_step(self.plan.actors[actor]) if per_step else 1

    def _turn(self, actor: Actor, act: int) -> Iterator[Need]:
        """The collective before it in its group's order."""
        if not isinstance(actor.work, BoxWork):
            return
        axis = self.plan.queue(actor)
        step, within = divmod(act, self.plan.acts_per_step(actor))
        found = self._before.get((actor.stage, axis, actor.id, within))
        if found is None or (step == 0 and found.earlier_step):
            return
        acts = self.plan.acts_per_step(self.plan.actors[found.actor])
        yield Need(TURN, axis, (found.actor, (step - found.earlier_step) * acts + found.act))

    @cached_property
    def _before(self) -> dict[tuple[int, int, int, int], _Before]:
        """(stage, axis, actor, act of the step) -> the collective before it in its group."""
        return {
            (*group, *each): _Before(*acts[place - 1], earlier_step=not place)
            for group, acts in self.plan.order
            for place, each in enumerate(acts)
        }


class _Before(NamedTuple):
    actor: int
    act: int
    earlier_step: bool


def step_of(plan: Plan, actor: int, act: int) -> int:
    """The step of an act."""
    return act // plan.acts_per_step(plan.actors[actor])


def by_device(
    notes: Iterable[TraceEvent], times: Mapping[ActKey, tuple[int, int]]
) -> list[TraceEvent]:
    """What a host noted, as its device saw it, which computes behind it.

    times: when each act of compute began and ended there.  What the host did took none of the
    device's time; where the device had nothing to compute, the rank slept.
    """
    out: list[TraceEvent] = []
    computed: list[TraceEvent] = []
    for note in notes:
        if note.what == COMPUTE:
            begin, end = times[note.actor, note.act]
            computed.append(note._replace(begin=begin, end=end))
        elif note.what == ISSUE:
            out.append(note._replace(end=note.begin))
        elif note.what == TAKE:
            out.append(note._replace(begin=note.end))
        elif note.what != SLEEP:
            out.append(note)
    computed.sort(key=lambda note: note.begin)
    for one, other in pairwise(computed):
        if other.begin > one.end:
            out.append(TraceEvent(SLEEP, other.actor, other.act, one.end, other.begin))
    return [*out, *computed]


def of_last_steps(plan: Plan, notes: Collection[TraceEvent], steps: int) -> list[TraceEvent]:
    """The notes of the last steps that began."""
    at = {note: step_of(plan, note.actor, note.act) for note in notes if note.what != RUN}
    last = max(at.values(), default=0)
    return [note for note in notes if at.get(note, last) > last - steps]


def slices_of(plan: Plan, rank: int, notes: Iterable[TraceEvent]) -> tuple[Slice, ...]:
    """The acts of a rank that were recorded from beginning to end, in order of their beginning."""
    begun: dict[ActKey, int] = {}
    ended: dict[ActKey, int] = {}
    done: dict[ActKey, int] = {}
    for what, actor, act, begin, end in notes:
        if what in (COMPUTE, ISSUE):
            begun[actor, act] = begin
        if what in (COMPUTE, FLIGHT):
            ended[actor, act] = end
        if what == TAKE:
            done[actor, act] = end
    needs = Needs(plan)
    found = []
    for (actor, act), begin in sorted(begun.items(), key=lambda item: (item[1], item[0])):
        if (actor, act) in ended:
            end = ended[actor, act]
            ready, need = _last(needs.of(actor, act), begun, ended, done)
            told = done.get((actor, act), end)
            found.append(Slice(rank, actor, act, begin, end, told, need, ready))
    return tuple(found)


def _last(
    needs: Iterable[Need],
    begun: Mapping[ActKey, int],
    ended: Mapping[ActKey, int],
    done: Mapping[ActKey, int],
) -> tuple[int | None, Need | None]:
    """The need that was met last, and when."""
    last: tuple[int | None, Need | None] = (None, None)
    for need in needs:
        time = begun.get(need.of) if need.why == TURN else done.get(need.of, ended.get(need.of))
        if time is not None and (last[0] is None or time > last[0]):
            last = time, need
    return last
