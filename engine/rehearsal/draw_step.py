"""draw_step: the first step of a plan act by act, with the bytes of every rank by what they are.

The rehearsal keeps the most bytes alone, and skips what repeats; this runs the same clock once more
and writes everything down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flowrun.engine.actors.plan import Plan
from flowrun.engine.cost.footprint import REGISTER_KINDS, kind_of
from flowrun.engine.cost.live import Live
from flowrun.engine.rehearsal.clock import Clock
from flowrun.engine.rehearsal.clock_state import ClockState, Event

WORK, PAGES = "work", "messages"  # acts under way; shared memory that messages have touched


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The first step of a plan, whose collectives have their order.

    events: the acts, in the order in which they ended.
    memory: of each stage, kind -> bytes of one rank at the fullest moment of each of some equal
        parts of the step.  Kinds: parameter, buffer, state, message (which stay), gradient, stash,
        other, WORK and PAGES.
    """

    events: tuple[Event, ...]
    memory: tuple[Mapping[str, tuple[int, ...]], ...]


class _LiveByKind(Live):
    """Live bytes that write themselves down.

    moments: seconds, all bytes, bytes that registers hold by kind, of acts under way, and of pages.
    """

    def __init__(self, plan: Plan, stage: int, state: ClockState) -> None:
        super().__init__(plan, stage)
        own = [r for r in plan.registers if r.stage == stage and not r.initial]
        self.kind: dict[str, str] = {}
        for kind in reversed(REGISTER_KINDS):
            of_kind = (r for r in own if kind_of(plan, r) == kind)
            self.kind |= {storage: kind for r in of_kind for storage in self.footprint.slot(r)}
        self.held_by = Counter(dict.fromkeys(REGISTER_KINDS, 0))
        self.state = state
        self.moments: list[tuple[float, int, dict[str, int]]] = []

    def _reach(self, actor: int, act: int, more: int) -> None:
        super()._reach(actor, act, more)
        work, pages = self.held + more, self.messages.touched
        now = {**self.held_by, WORK: work, PAGES: pages}
        self.moments.append((self.state.now, self.live + work + pages, now))

    def _add(self, storage: str, version: int, count: int) -> None:
        super()._add(storage, version, count)
        self.held_by[self.kind[storage]] += count * self.footprint.storage_bytes(storage)


def draw_step(plan: Plan, parts: int) -> DrawnStep:
    """Run the first step of a rehearsed plan.  parts: of the step, for memory."""
    clock = Clock(plan, lambda actor: actor.seconds, steps=1, skip_repeats=False)
    stages = range(len(plan.placements))
    memory = [_LiveByKind(plan, stage, clock.state) for stage in stages]
    clock.count_memory, clock.state.memory = True, [*memory]
    clock.run()
    acts, end_s = clock.table.acts, clock.state.now
    events = tuple(event for event in clock.state.events if event.act < acts[event.actor])
    return DrawnStep(events, tuple(_fullest(live, end_s, parts) for live in memory))


def _fullest(live: _LiveByKind, end_s: float, parts: int) -> Mapping[str, tuple[int, ...]]:
    """Return the bytes at the fullest moment of each part of the step; a part in which nothing
    begins or ends is as the one before.
    """
    most = [-1] * parts
    found: list[dict[str, int]] = [{}] * parts
    for time, total, now in live.moments:
        part = min(parts - 1, int(time / end_s * parts)) if end_s else 0
        if total > most[part]:
            most[part], found[part] = total, now
    for part in range(1, parts):
        found[part] = found[part] or found[part - 1]
    stays = {kind: (size,) * parts for kind, size in live.footprint.kind_bytes.items()}
    kinds = (*REGISTER_KINDS, WORK, PAGES)
    return stays | {kind: tuple(at.get(kind, 0) for at in found) for kind in kinds}
