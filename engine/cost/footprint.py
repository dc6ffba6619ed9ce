"""Footprint: the bytes that one rank of a stage holds, storage by storage, act by act.

Tensors that are views of one another share a *storage*, named after the tensor that made it; it
lives as long as any of them.  The rank with the largest shards stands for all.  Memory that kernels
take for themselves counts if the hardware profile knows it (`workspace`); memory that the allocator
and the transport keep for themselves does not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from flowrun.engine.actors.plan import (
    Actor,
    BoxWork,
    Plan,
    PrepareWork,
    RegionWork,
    Register,
    TransferWork,
)
from flowrun.engine.actors.sums import find_reused_addends, sums_of
from flowrun.engine.cost import staging
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import Shape, largest_shape
from flowrun.engine.ir.sbp import NdSbp, is_elsewhere
from flowrun.engine.ops.flow.update import ACCUMULATE
from flowrun.engine.ops.registry import info
from flowrun.engine.ops.traits import has, is_view

REGISTER_KINDS = ("gradient", "stash", "other")  # a storage of several is of the first


@dataclass(frozen=True, slots=True)
class ActBytes:
    """Bytes of one act, beyond what was live before it.

    begin: most while it runs (of communication: while it is issued).
    held: held by communication in flight.
    end: most while its outputs are stored.
    written: into shared memory, until the act ends.
    """

    begin: int = 0
    held: int = 0
    end: int = 0
    written: int = 0


class Footprint:
    """The bytes that the tensors, registers and acts of one stage of a plan take."""

    def __init__(self, plan: Plan, stage: int) -> None:
        self.plan = plan
        self.grid = plan.placements[stage].shape
        self.layout: dict[str, NdSbp] = {}
        self._bytes: dict[str, int] = {}
        self._slots: dict[int, frozenset[str]] = {}
        self.kind_bytes: dict[str, int] = {}  # parameter, buffer, state
        self.source: dict[str, str] = {}  # tensor -> the one whose memory it shares
        self.extra: dict[str, int] = {}  # storage of a message -> its bytes
        sources = (source for source in plan.graph.sources if source.stage == stage)
        self.layout.update((source.tensor, source.nd_sbp) for source in sources)
        self.always = {v.tensor for v in plan.graph.variables}
        self.updated = {v.new: v.tensor for v in plan.graph.variables if v.new}
        self.updated |= {v.copies[1]: v.copies[0] for v in plan.graph.variables if v.copies}
        for op in (op for op in plan.graph.ops if op.stage == stage):
            self._add_op(op)
        for actor in plan.stage_actors(stage):
            self._add_actor(actor)
        self._count_kinds(stage)
        self._regions: dict[tuple[int, frozenset[str], bool], ActBytes] = {}

    def _count_kinds(self, stage: int) -> None:
        elsewhere = self.plan.host_apart
        for v in self.plan.graph.variables:
            if v.stage != stage or (v.copies and elsewhere):
                continue
            self.kind_bytes[v.kind] = self.kind_bytes.get(v.kind, 0) + self.tensor_bytes(v.tensor)
        actors = self.plan.stage_actors(stage)
        own = {self.storage(name) for actor in actors for name in self._own(actor)}
        if own - self.always:
            self.kind_bytes["message"] = self._sum(own)
            self.always |= own

    def _add_actor(self, actor: Actor) -> None:
        if isinstance(actor.work, PrepareWork):
            self.layout[actor.work.made] = actor.work.feeds[0].nd_sbp
        if isinstance(actor.work, RegionWork):
            self.source.update(actor.work.overwrites)
        self._add_message(actor)

    def _add_op(self, op: Op) -> None:
        for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=True):
            if name is not None:
                self.layout[name] = nd_sbp
        only = op.target == ACCUMULATE and self.plan.micro_batches == 1  # else in a copy
        if only or is_view(op.target):
            self.source.update(dict.fromkeys(op.makes, op.inputs[0]))
        if has(op.target, Trait.IN_PLACE):
            self.source.update({n: self.updated[n] for n in op.makes if n in self.updated})

    def _add_message(self, actor: Actor) -> None:
        if isinstance(actor.work, BoxWork) and actor.work.one_copy:
            self.source.update((move.made, move.read) for move in actor.work.moves)
        elif isinstance(actor.work, BoxWork | TransferWork) and actor.kind != "send":
            outputs = [move.made for move in actor.work.moves]
            if outputs and self.message(actor).shared:
                self.extra[outputs[0]] = sum(map(self.tensor_bytes, outputs))
                self.source.update(dict.fromkeys(outputs[1:], outputs[0]))

    def _own(self, actor: Actor) -> tuple[str, ...]:
        work = actor.work
        if not self.plan.own_messages or self.plan.blocks(actor) or not isinstance(work, BoxWork):
            return ()
        return tuple(move.made for move in work.moves)

    def tensor_bytes(self, name: str) -> int:
        """Return the bytes of a tensor on the rank with the largest shard."""
        if name not in self._bytes:
            shape, layout = self._shape(name, self.layout[name]), self.layout[name]
            held = not is_elsewhere(layout, (0,) * len(layout))  # the first rank owns the most
            self._bytes[name] = held * math.prod(shape) * self.plan.tensors[name].dtype.itemsize
        return self._bytes[name]

    def _shape(self, name: str, nd_sbp: NdSbp) -> Shape:
        return largest_shape(self.plan.tensors[name].shape, nd_sbp, self.grid)

    def storage(self, name: str) -> str:
        """Return the tensor whose memory this one uses."""
        while name in self.source:
            name = self.source[name]
        return name

    def storage_bytes(self, storage: str) -> int:
        """Return the bytes of a storage; 0 for variables and others that always exist."""
        if storage in self.always:
            return 0
        return self.extra.get(storage) or self.tensor_bytes(storage)

    def slot(self, register: Register) -> frozenset[str]:
        """Return the storages that one version of a register holds."""
        if register.id not in self._slots:
            storages = frozenset(map(self.storage, register.tensors)) - self.always
            self._slots[register.id] = storages
        return self._slots[register.id]

    # ------------------------------------------------------------------ acts

    def act(self, actor: Actor, freed: frozenset[str], first: bool) -> ActBytes:
        """Return the bytes of one act of `actor`.

        freed: storages that nobody reads after it.  first: it is the actor's first act of the step,
        in which sums over micro-batches get their memory.
        """
        if isinstance(actor.work, RegionWork):
            key = (actor.id, freed, first)
            if key not in self._regions:
                self._regions[key] = self._region(actor.work, freed, first)
            return self._regions[key]
        if isinstance(actor.work, BoxWork | TransferWork):
            message = self.message(actor)
            gone = 0 if message.keeps else self._sum(freed)
            return ActBytes(message.begin, message.held - gone, message.end - gone, message.written)
        filled = {s for r in actor.outputs for s in self.slot(self.plan.registers[r])}
        total = sum(map(self.storage_bytes, filled))
        return ActBytes(total, 0, total)

    def message(self, actor: Actor) -> staging.Staging:
        """Return the bytes that an act of communication holds in addition to what it reads."""
        work = actor.work
        assert isinstance(work, BoxWork | TransferWork)
        if self._own(actor) or (isinstance(work, BoxWork) and work.one_copy):
            return staging.IN_PLACE
        shared = self.plan.shared_memory
        if actor.kind == "send":
            return staging.send(sum(self.tensor_bytes(move.read) for move in work.moves), shared)
        after = [self.tensor_bytes(move.made) for move in work.moves]
        if isinstance(work, TransferWork):
            return staging.receive(sum(after), shared)
        before = [self.tensor_bytes(move.read) for move in work.moves]
        parts = self.grid[work.step.axis]
        if shared:
            return staging.shared_collective(work.step.kind, parts, before, after)
        return staging.collective(work.step.kind, parts, before, after)

    def _region(self, work: RegionWork, freed: frozenset[str], first: bool) -> ActBytes:
        """Return the bytes of a region, op by op."""
        bytes_ = peak = 0
        for fresh, workspace, dead in self.ops_of(work, freed, first):
            bytes_ += self._sum(fresh)
            peak = max(peak, bytes_ + workspace)
            bytes_ -= self._sum(dead)
        collected = () if not first else set(work.accumulates).difference(sums_of(self.plan, work))
        copies = self._sum(collected) if self.plan.micro_batches > 1 else 0
        return ActBytes(peak, 0, max(0, bytes_ + copies))

    def ops_of(
        self, work: RegionWork, freed: frozenset[str], first: bool
    ) -> Iterator[tuple[Collection[str], int, Collection[str]]]:
        """Yield, for each op of a region: the storages that it makes, the bytes that its kernel
        takes for itself, and the storages that are free after it.

        A storage is free after the last op that reads a view of it.
        """
        sums = frozenset(sums_of(self.plan, work))
        collected = frozenset(work.accumulates) - sums
        shown = collected | (find_reused_addends(self.plan, work) if first else frozenset())
        storage = {n: self._within(n, shown) for op in work.ops for n in (*op.inputs, *op.makes)}
        kept = {storage[name] for name in (*work.makes, *(new for _, new in work.updates))}
        live = {storage[name] for name in work.reads} - freed
        dies = _last_uses(work, storage, kept | live)
        existing: set[str] = {storage[name] for name in work.reads}
        if not first:
            existing |= {storage[name] for name in sums}
        for k, op in enumerate(work.ops):
            fresh = {storage[name] for name in op.makes} - existing
            existing |= fresh
            yield fresh, self._workspace(op), dies.get(k, ())

    def _within(self, name: str, shown: frozenset[str]) -> str:
        """Return the storage of a tensor inside of a region.

        shown: tensors that share the storage of their input here and have their own outside.
        """
        while name in self.source or name in shown:
            op = self.plan.graph.producer.get(name)
            name = self.source[name] if name in self.source else op.inputs[0]  # type: ignore[union-attr]
        return name

    def _sum(self, storages: Iterable[str]) -> int:
        return sum(map(self.storage_bytes, storages))

    def _workspace(self, op: Op) -> int:
        """Return the bytes that an op's kernel takes for itself: what the hardware profile says,
        what its cost says, or a scaled copy of a clipped gradient.
        """
        if op.target in self.plan.workspace:
            return int(self.plan.workspace[op.target] * self.tensor_bytes(op.makes[0]))
        if (held := info(op.target).cost.held_bytes) is not None:
            shapes = [self._shape(name, nd) for name, nd in zip(op.inputs, op.in_sbp, strict=True)]
            return held(op, shapes, self.plan.tensors[op.inputs[0]].dtype.itemsize)
        clipped = any(name.startswith("clip_scale") for name in op.inputs)
        scales = clipped and has(op.target, Trait.FUSED)
        return self.tensor_bytes(op.inputs[1]) if scales else 0


def kind_of(plan: Plan, register: Register) -> str:
    """Return which of REGISTER_KINDS a register is."""
    maker = register.producer
    if register.per_step and maker is not None and not plan.actors[maker].per_step:
        return "gradient"
    return "stash" if register.stash else "other"


def memory_of(plan: Plan, stage: int) -> Mapping[str, int]:
    """Return the bytes of a stage that registers may hold, by kind: parameter, buffer, state,
    gradient, stash, other.
    """
    footprint = Footprint(plan, stage)
    held = {"parameter": 0, "buffer": 0, "state": 0, **footprint.kind_bytes}
    counted: set[str] = set()
    for kind in REGISTER_KINDS:
        held[kind] = 0
        for r in (r for r in plan.registers if r.stage == stage and not r.initial):
            if kind == kind_of(plan, r):
                new = footprint.slot(r) - counted
                counted |= new
                held[kind] += r.slots * sum(map(footprint.storage_bytes, new))
    return held


def _last_uses(
    work: RegionWork, storage: Mapping[str, str], kept: Collection[str]
) -> dict[int, set[str]]:
    """Number of an op -> storages that no later op uses, without those that are `kept`."""
    last = {storage[n]: k for k, op in enumerate(work.ops) for n in (*op.inputs, *op.makes)}
    dies: dict[int, set[str]] = {}
    for name, k in last.items():
        if name not in kept:
            dies.setdefault(k, set()).add(name)
    return dies
