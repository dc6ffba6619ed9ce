"""Live: the bytes of one rank of a stage while a plan is rehearsed, act by act.

The rehearsal foresees when each act runs, and with it how many micro-batches wait for backward at
once.  In a run messages may arrive in another order and the number may differ, up to the slots of
the stash registers, or to what turns let chunks hold together, which `bound` counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from flowrun.engine.actors.plan import SEND, Actor, Plan, RegionWork, Register
from flowrun.engine.cost.footprint import ActBytes, Footprint
from flowrun.engine.cost.messages import Messages
from flowrun.engine.ir.graph import BACKWARD, FORWARD

StorageVersion = tuple[str, int]  # a storage, and its version: a number of a micro-batch or step
_ReaderCounts = list[tuple[StorageVersion, int]]


class Live:
    """The bytes of one rank while a plan is rehearsed.

    peak: most at once, plus every page of shared memory that messages ever touched: pages stay.
    bound: the same, if every stash register is full besides the micro-batch that an act works on,
        and a slow reader leaves a message of each actor unread that no throttle holds back.
    of_act: actor -> the most bytes at once at any of its acts, without messages.
    """

    def __init__(self, plan: Plan, stage: int) -> None:
        self.plan = plan
        self.stage = stage
        self.footprint = Footprint(plan, stage)
        self.live = sum(self.footprint.kind_bytes.values())
        self.of_step = {  # storages that a step makes once; micro-batches may hold views of them
            storage
            for r in plan.registers
            if r.per_step and r.stage == stage
            for storage in self.footprint.slot(r)
        }
        self.slots = self._stash_slots(stage)
        self.chunk = self._find_kept(stage) if plan.schedule.keeps_turns else {}
        # (chunk, micro-batch) -> bytes that wait for its backward; chunk None: of any, in slots
        self.stashed: dict[tuple[int | None, int], int] = {}
        self._size = cache(self.footprint.storage_bytes)
        free = self.slots.keys() - self.chunk.keys()
        in_slots = sum((self.slots[s] - 1) * self._size(s) for s in free)
        self.others = {None: in_slots, **self._others_in_turn()}
        self.under_way: dict[int, int] = {}
        self._read: dict[int, _ReaderCounts] = {}  # of acts under way
        self.waiting = dict.fromkeys((True, False), 0)  # sums of stashed: in turn, in slots
        self.held = 0  # sum of under_way
        self.messages = Messages()
        empty = [r for r in plan.registers if r.stage == stage and not r.tensors]
        self.throttled = {k for r in empty for k in (r.producer, *r.readers)}
        self._peak = self._bound = self.live
        self.of_act: dict[int, int] = {}
        self.readers_left: dict[StorageVersion, int] = {}  # to come, of all registers that hold it
        self._facts = {actor.id: self._facts_of(actor) for actor in plan.stage_actors(stage)}
        self._acts: dict[tuple[int, bool, tuple[str, ...]], ActBytes] = {}

    @property
    def peak(self) -> int:
        """The most bytes that were live at once, and the touched bytes of messages."""
        return self._peak + self.messages.touched

    @property
    def bound(self) -> int:
        """The most bytes with every stash full, and the bytes of messages at most."""
        return self._bound + self.message_bound

    @property
    def message_bound(self) -> int:
        """The bytes of messages, most of which may be unread at once: their pages stay."""
        sizes = self.messages.largest.items()
        unread = sum(size for actor, size in sizes if actor not in self.throttled)
        return max(self.messages.touched, unread)

    def moment(self) -> tuple[object, ...]:
        """Return everything that decides what follows, except versions."""
        return self.live, self.messages.moment()

    def begin(self, actor: int, act: int) -> None:
        read = self._read[actor] = self._facts[actor].read.versions(act + 1, act)
        needed = self._act(actor, act, read)
        self._reach(actor, act, needed.begin)
        self.under_way[actor] = needed.held
        self.held += needed.held
        self.messages.begin(actor, needed.written)

    def end(self, actor: int, act: int) -> None:
        """Record that an act ends: its outputs are live; inputs that it was the last to read are
        free.
        """
        self.held -= self.under_way.pop(actor)
        self.messages.end(actor)
        facts = self._facts[actor]
        if facts.computes:
            self.messages.end_compute()
        read, left = self._read.pop(actor), self.readers_left
        self._reach(actor, act, self._act(actor, act, read).end)
        for held, readers in facts.filled.versions(act, act):
            before = left.get(held)
            if before is None:
                self._add(*held, 1)
                left[held] = readers
            else:
                left[held] = before + readers
        for held, readers in read:
            before = left.get(held)
            if before == readers:
                del left[held]
                self._add(*held, -1)
            elif before is not None:
                left[held] = before - readers

    def forward(self, acts: int) -> None:
        """Fast-forward by `acts` micro-batches: every version has a number larger by `acts`."""

        def later(counts: Iterable[tuple[StorageVersion, int]]) -> _ReaderCounts:
            return [((s, v if s in self.of_step else v + acts), n) for (s, v), n in counts]

        self.readers_left = dict(later(self.readers_left.items()))
        self._read = {actor: later(read) for actor, read in self._read.items()}
        self.stashed = {(chunk, version + acts): n for (chunk, version), n in self.stashed.items()}

    def _stash_slots(self, stage: int) -> dict[str, int]:
        """Return storage that waits for backward -> the most versions of it."""
        slots: dict[str, int] = {}
        for r in (r for r in self.plan.registers if r.stash and r.stage == stage):
            for storage in self.footprint.slot(r) - self.of_step:
                slots[storage] = max(r.slots, slots.get(storage, 0))
        return slots

    def _find_kept(self, stage: int) -> dict[str, int]:
        """Return storage -> chunk, of what forwards make that backwards of the same chunk free."""
        kept: dict[str, int] = {}
        free: set[str] = set()
        for r in (r for r in self.plan.registers if r.stash and r.stage == stage):
            chunk = -1 if r.producer is None else self._chunk_of(r.producer)
            if chunk >= 0 and all(self._ends_with(k, chunk) for k in r.readers):
                kept |= dict.fromkeys(self.footprint.slot(r) - self.of_step, chunk)
            else:
                free |= self.footprint.slot(r)
        return {storage: chunk for storage, chunk in kept.items() if storage not in free}

    def _chunk_of(self, actor: int) -> int:
        """Return the chunk whose turns a region keeps; -1: any other actor."""
        work, phase = self.plan.actors[actor].work, self.plan.actors[actor].phase
        keeps = self.plan.schedule.keeps_turns and phase in (FORWARD, BACKWARD)
        return work.ops[0].chunk if keeps and isinstance(work, RegionWork) else -1

    def _ends_with(self, actor: int, chunk: int) -> bool:
        """Return whether backward of a chunk comes after an actor: it waits for its acts."""
        described, known = self.plan.actors[actor], self.plan.registers
        if isinstance(described.work, RegionWork):
            return self._chunk_of(actor) == chunk
        if described.kind == SEND:
            return described.phase == FORWARD
        return any(self._ends_with(k, chunk) for r in described.outputs for k in known[r].readers)

    def _others_in_turn(self) -> dict[int | None, int]:
        """Return chunk -> the most bytes of what is kept, besides a micro-batch of the chunk."""
        schedule = self.plan.schedule
        sizes = [0] * schedule.chunks
        for storage, chunk in self.chunk.items():
            sizes[chunk] += self._size(storage)
        most = schedule.most_held(self.stage, sizes, steps=2) if self.chunk else 0
        return {chunk: most - size for chunk, size in ((-1, 0), *enumerate(sizes))}

    def _may_wait(self, chunk: int | None, act: int) -> int:
        """Return the bytes that may wait for backward besides those that do, during an act.

        chunk: of the act, or -1: of what turns limit; None: of what slots do.
        """
        waiting = self.waiting[chunk is not None] - self.stashed.get((chunk, act), 0)
        return max(0, self.others[chunk] - waiting)

    def _reach(self, actor: int, act: int, more: int) -> None:
        """Update peak and bound with `more` bytes than are live."""
        now, facts = self.live + self.held + more, self._facts[actor]
        if now > self.of_act.get(actor, -1):
            self.of_act[actor] = now
            self._peak = max(self._peak, now)
        if not facts.per_step:
            now += self._may_wait(None, act)
            if self.chunk:
                now += self._may_wait(facts.chunk, act)
        if now > self._bound:
            self._bound = now

    def _add(self, storage: str, version: int, count: int) -> None:
        num_bytes = count * self._size(storage)
        self.live += num_bytes
        if storage in self.slots:
            chunk = self.chunk.get(storage)
            self.waiting[chunk is not None] += num_bytes
            left = self.stashed.pop((chunk, version), 0) + num_bytes
            if left:
                self.stashed[chunk, version] = left

    def _act(self, actor: int, act: int, read: _ReaderCounts) -> ActBytes:
        """Return the bytes of an act; an actor has few kinds, by the storages that they free: all
        of whose readers to come are in `read`.
        """
        freed = tuple([storage for storage, _ in self.freed_after(read)])
        first = self.is_first(actor, act)
        key = (actor, first, freed)
        if key not in self._acts:
            described = self.plan.actors[actor]
            self._acts[key] = self.footprint.act(described, frozenset(freed), first)
        return self._acts[key]

    def freed_after(self, read: _ReaderCounts) -> list[StorageVersion]:
        """Return what nobody reads after the act that reads `read`."""
        left = self.readers_left
        return [held for held, readers in read if left.get(held) == readers]

    def is_first(self, actor: int, act: int) -> bool:
        """Return whether an act is the first of its actor in a step."""
        return act % self._facts[actor].filled.acts == 0

    def _facts_of(self, actor: Actor) -> _Facts:
        known, acts = self.plan.registers, self.plan.acts_per_step(actor)
        filled = [(known[r], len(known[r].readers)) for r in actor.outputs]
        read = [(known[r], 1) for r in actor.inputs if known[r].producer is not None]
        return _Facts(
            filled=self._changes_in(filled, acts),
            read=self._changes_in(read, acts),
            chunk=self._chunk_of(actor.id),
            computes=isinstance(actor.work, RegionWork),
            per_step=actor.per_step,
        )

    def _changes_in(self, registers: Iterable[tuple[Register, int]], acts: int) -> _Changes:
        """registers: each with the readers that come or go.  acts: of the actor in a step."""
        each, of_step = Counter[tuple[str, int]](), Counter[str]()
        for register, readers in registers:
            for storage in () if register.initial else sorted(self.footprint.slot(register)):
                if acts > 1 and register.per_step:
                    of_step[storage] += readers
                else:
                    each[storage, acts if storage in self.of_step else 1] += readers
        return _Changes(tuple(each.items()), tuple(of_step.items()), acts)


class _Changes(NamedTuple):
    """Storages that an actor fills or reads with its acts, and the readers that come or go.

    each: with each act, of which some share a version.  of_step: with each step of `acts` acts.
    Those of variables are left out.
    """

    each: tuple[tuple[tuple[str, int], int], ...]
    of_step: tuple[tuple[str, int], ...]
    acts: int

    def versions(self, at: int, act: int) -> _ReaderCounts:
        """Return the readers of what changes at the act.  at: number of acts until then."""
        versions = [((storage, act // lasts), n) for (storage, lasts), n in self.each]
        if not self.of_step or at % self.acts:
            return versions
        both = Counter(dict(versions))
        both.update({(storage, act // self.acts): n for storage, n in self.of_step})
        return list(both.items())


class _Facts(NamedTuple):
    """What an actor's acts change.

    filled, read: the storages that an act fills, and those that it reads.  chunk: see
    Live._chunk_of.  computes: it is a region.
    """

    filled: _Changes
    read: _Changes
    chunk: int
    computes: bool
    per_step: bool
