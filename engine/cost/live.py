"""Live: the bytes of one rank of a stage while a plan is rehearsed, act by act.

The rehearsal foresees when each act runs, and with it how many micro-batches wait for backward at
once.  In a run messages may arrive in another order and the number may differ, up to the slots of
the stash registers, which `bound` counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import NamedTuple, TypeVar

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.cost.footprint import ActBytes, Footprint
from flowrun.engine.cost.messages import Messages

K = TypeVar("K")


class Live:
    """The bytes of one rank while a plan is rehearsed.

    peak: most at once, plus every page of shared memory that messages ever touched: pages stay.
    bound: the same, if every stash register is full besides the micro-batch that an act works on.
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
        self.stashed: dict[int, int] = {}  # micro-batch -> bytes that wait for its backward
        size = self.footprint.storage_bytes
        self.others = sum((slots - 1) * size(s) for s, slots in self.slots.items())
        self.under_way: dict[int, int] = {}
        self.waiting = self.held = 0  # sums of stashed and under_way
        self.messages = Messages()
        self._peak = self._bound = self.live
        self.of_act: dict[int, int] = {}
        self.readers_left: dict[int, dict[int, int]] = {}  # register -> version -> readers to come
        # storage -> version -> versions of registers that hold it
        self.holders: defaultdict[str, dict[int, int]] = defaultdict(dict)
        # register -> the storages that a version of it holds
        self._pieces: dict[int, tuple[_HeldStorage, ...]] = {}
        self._changes: dict[int, tuple[_Changes, _Changes]] = {}  # actor -> (filled, read)
        self._acts: dict[tuple[int, bool, tuple[str, ...]], ActBytes] = {}

    @property
    def peak(self) -> int:
        """The most bytes that were live at once, and the touched bytes of messages."""
        return self._peak + self.messages.touched

    @property
    def bound(self) -> int:
        """The most bytes with every stash full, and the touched bytes of messages."""
        return self._bound + self.messages.touched

    def moment(self) -> tuple[object, ...]:
        """Return everything that decides what follows, except versions."""
        return self.live, self.messages.moment()

    def begin(self, actor: int, act: int) -> None:
        needed = self._act(actor, act)
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
        if isinstance(self.plan.actors[actor].work, RegionWork):
            self.messages.end_compute()
        self._reach(actor, act, self._act(actor, act).end)
        fills, reads = self._changes_of(actor)
        for r, version in fills.versions(act, act):
            self.readers_left.setdefault(r, {})[version] = len(self.plan.registers[r].readers)
            for piece in self._held(r):
                storage_version, versions = (
                    self._storage_version(r, version, piece),
                    self.holders[piece.storage],
                )
                versions[storage_version] = held = versions.get(storage_version, 0) + 1
                if held == 1:
                    self._add(piece, storage_version, 1)
        for r, version in reads.versions(act + 1, act):
            left = self.readers_left.get(r)
            if left and version in left:
                left[version] -= 1
                if not left[version]:
                    del left[version]
                    self._drop(r, version)

    def forward(self, acts: int) -> None:
        """Fast-forward by `acts` micro-batches: every version has a number larger by `acts`."""
        per_step = {r.id for r in self.plan.registers if r.per_step and r.stage == self.stage}
        self.readers_left = _later(self.readers_left, per_step, acts)
        self.holders = defaultdict(dict, _later(self.holders, self.of_step, acts))
        self.stashed = {version + acts: n for version, n in self.stashed.items()}

    def _stash_slots(self, stage: int) -> dict[str, int]:
        """Return storage that waits for backward -> the most versions of it."""
        slots: dict[str, int] = {}
        for r in (r for r in self.plan.registers if r.stash and r.stage == stage):
            for storage in self.footprint.slot(r) - self.of_step:
                slots[storage] = max(r.slots, slots.get(storage, 0))
        return slots

    def _reach(self, actor: int, act: int, more: int) -> None:
        """Update peak and bound with `more` bytes than are live."""
        now = self.live + self.held + more
        self._peak = max(self._peak, now)
        self.of_act[actor] = max(self.of_act.get(actor, 0), now)
        if not self.plan.actors[actor].per_step:
            waiting = self.waiting - self.stashed.get(act, 0)
            now += max(0, self.others - waiting)
        self._bound = max(self._bound, now)

    def _add(self, piece: _HeldStorage, version: int, count: int) -> None:
        num_bytes = count * piece.num_bytes
        self.live += num_bytes
        if piece.waits:
            self.waiting += num_bytes
            self.stashed[version] = self.stashed.get(version, 0) + num_bytes
            if not self.stashed[version]:
                del self.stashed[version]

    def _drop(self, register: int, version: int) -> None:
        for piece in self._held(register):
            storage_version, versions = (
                self._storage_version(register, version, piece),
                self.holders[piece.storage],
            )
            versions[storage_version] -= 1
            if not versions[storage_version]:
                del versions[storage_version]
                self._add(piece, storage_version, -1)

    def _storage_version(self, register: int, version: int, piece: _HeldStorage) -> int:
        """Return the version of a storage that one of a register holds: its own, or the step's."""
        views = piece.storage in self.of_step and not self.plan.registers[register].per_step
        return version // self.plan.micro_batches if views else version

    def _act(self, actor: int, act: int) -> ActBytes:
        """Return the bytes of an act; an actor has few kinds, by the storages that they free."""
        freed, first = (
            self._storages_freed_by(actor, act),
            act % self._changes_of(actor)[0].acts == 0,
        )
        key = (actor, first, freed)
        if key not in self._acts:
            described = self.plan.actors[actor]
            self._acts[key] = self.footprint.act(described, frozenset(freed), first)
        return self._acts[key]

    def _held(self, register: int) -> tuple[_HeldStorage, ...]:
        if register not in self._pieces:
            size = self.footprint.storage_bytes
            held = sorted(self.footprint.slot(self.plan.registers[register]))
            self._pieces[register] = tuple(_HeldStorage(s, size(s), s in self.slots) for s in held)
        return self._pieces[register]

    def _changes_of(self, actor: int) -> tuple[_Changes, _Changes]:
        """Return the versions that an act begins to fill, and those that it is the last to read."""
        if actor not in self._changes:
            described, known = self.plan.actors[actor], self.plan.registers
            acts = self.plan.acts_per_step(described)
            fills, reads = (
                _Changes(
                    tuple(r for r in own if acts == 1 or not known[r].per_step),
                    tuple(r for r in own if acts > 1 and known[r].per_step),
                    acts,
                )
                for own in (
                    [r for r in registers if not known[r].initial]
                    for registers in (described.outputs, described.inputs)
                )
            )
            self._changes[actor] = fills, reads
        return self._changes[actor]

    def _storages_freed_by(self, actor: int, act: int) -> tuple[str, ...]:
        """Return the storages that nobody holds once this act has returned its inputs."""
        freed: list[str] = []
        shared: dict[tuple[str, int], int] = {}  # held by several registers -> returned so far
        for r, version in self._changes_of(actor)[1].versions(act + 1, act):
            left = self.readers_left.get(r)
            if not left or left.get(version) != 1:
                continue
            for piece in self._held(r):
                storage_version = self._storage_version(r, version, piece)
                holders = self.holders[piece.storage][storage_version]
                if holders > 1:
                    key = (piece.storage, storage_version)
                    shared[key] = shared.get(key, 0) + 1
                    if shared[key] < holders:
                        continue
                freed.append(piece.storage)
        return tuple(freed)


class _HeldStorage(NamedTuple):
    """A storage that a version of a register holds.  waits: it waits for backward, in a stash."""

    storage: str
    num_bytes: int
    waits: bool


class _Changes(NamedTuple):
    """Registers of which an actor fills or reads another version.

    each: with each act.  of_step: with each step of `acts` acts.  Registers of variables are left
        out.
    """

    each: tuple[int, ...]
    of_step: tuple[int, ...]
    acts: int

    def versions(self, at: int, act: int) -> list[tuple[int, int]]:
        """Return the (register, version) that change at the act.  at: number of acts until then."""
        versions = [(r, act) for r in self.each]
        if self.of_step and at % self.acts == 0:
            versions += [(r, act // self.acts) for r in self.of_step]
        return versions


def _later(
    versions: dict[K, dict[int, int]], of_step: Container[K], acts: int
) -> dict[K, dict[int, int]]:
    return {
        key: found if key in of_step else {v + acts: n for v, n in found.items()}
        for key, found in versions.items()
    }
