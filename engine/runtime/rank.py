"""Rank: the buffers of one rank, its variables and its kernels.

Runs acts; knows no protocol, no clock, no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol, cast

import torch

from flowrun.engine.graph import Feed
from flowrun.engine.placement import Slices, local_slices
from flowrun.engine.plan import (
    Actor,
    BoxWork,
    FeedWork,
    Plan,
    PrepareWork,
    RegionWork,
    ReportWork,
    TransferWork,
)
from flowrun.engine.runtime.kernels import Kernel, region_kernel
from flowrun.engine.runtime.transport import Layout, layout_of

# (step, micro-batch) -> batch of the whole micro-batch, logical; a rank cuts what it holds
Batches = Callable[[int, int, slice], Mapping[str, torch.Tensor]]
Values = list[torch.Tensor]
Results = dict[str, Any]  # of a step, by name: a number, or a list with one of each rank


class Samples(Protocol):
    """Batches whose samples are made in steps, each by an actor of its own."""

    def prepare(
        self, name: str, samples: list[Any] | None, step: int, micro_batch: int, rows: slice
    ) -> list[Any]:
        """The samples after the step `name`; None: before the first."""

    def at_once(self, step: int, micro_batch: int, rows: slice) -> Mapping[str, torch.Tensor]:
        """The fields that need no step (Strategy.unprepared)."""

    def collate(self, samples: list[Any]) -> Mapping[str, torch.Tensor]:
        """The batch of samples that are ready."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where an input tensor of an actor lies: a variable (register None), or a position of a
    register.
    """

    name: str
    register: int | None
    position: int = 0
    every: int = 1


@dataclass(frozen=True, slots=True)
class _Port:
    """A register that an actor reads or fills.  every: acts of the actor that one version lasts."""

    register: int
    every: int
    tensors: tuple[str, ...]
    num_readers: int


class Rank:
    """One rank of a plan.

    batches(step, micro_batch, rows): rows (a slice of samples) of a micro-batch as logical tensors.
    initial: logical initial value of each parameter and buffer by variable name; states start at
    zero.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        batches: Batches,
        initial: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.stage = plan.stage_of(rank)
        self.placement = plan.placements[self.stage]
        self.grid = self.placement.shape
        self.coordinate = self.placement.coordinate(rank)
        self.batches = batches
        self.device = device
        self.variables: dict[str, torch.Tensor] = {}
        self.slots: dict[tuple[int, int], Values] = {}  # (register, version) -> tensors
        self.left: dict[tuple[int, int], int] = {}  # readers that have not returned it
        self.live: dict[int, int] = {}  # register -> versions live now
        self.most_live: dict[int, int] = {}  # register -> most versions live at once
        self.results: dict[int, Results] = {}
        self.acts: dict[int, int] = {}
        self.kernels: dict[int, Kernel] = {}
        self.sources: dict[int, tuple[_Source, ...]] = {}
        self.read: dict[int, tuple[_Port, ...]] = {}
        self.filled: dict[int, tuple[_Port, ...]] = {}
        self._layouts: dict[int, list[Layout]] = {}
        self._own_variables(initial)
        for actor in plan.stage_actors(self.stage):
            self.sources[actor.id] = self._sources(actor)
            self.read[actor.id] = self._ports(actor, actor.inputs)
            self.filled[actor.id] = self._ports(actor, actor.outputs)
            if isinstance(actor.work, RegionWork):
                self.kernels[actor.id] = region_kernel(
                    plan, actor.work, self.stage, self.coordinate
                )

    # ------------------------------------------------------------------ set-up

    def _own_variables(self, initial: Mapping[str, torch.Tensor]) -> None:
        for v in self.plan.graph.variables:
            if v.stage != self.stage:
                continue
            tensor = self.plan.graph.tensors[v.tensor]
            slices = local_slices(tensor.shape, v.nd_sbp, self.grid, self.coordinate)
            if v.kind == "state" and v.start is not None:
                size = [n for _, n in slices]
                value = torch.full(size, v.start, dtype=tensor.dtype, device=self.device)
            else:
                value = cut(initial[v.of or v.name], slices).to(
                    self.device, tensor.dtype, copy=True
                )
            self.variables[v.tensor] = value

    def share_variables(self, other: Rank, instead: Mapping[str, str]) -> None:
        """Read the variables that the same rank of another plan writes (evaluation those of
        training), by their names, or by those that `instead` gives.
        """
        homes = {v.name: tensor for tensor, v in other.plan.variables.items()}
        for tensor, own in self.variables.items():
            name = self.plan.variables[tensor].name
            home = homes.get(instead.get(name, name), "")
            self.variables[tensor] = other.variables.get(home, own)

    def _sources(self, actor: Actor) -> tuple[_Source, ...]:
        places: dict[str, _Source] = {}
        acts = self.plan.acts_per_step(actor)
        for register in (self.plan.registers[i] for i in actor.inputs):
            for position, name in enumerate(register.tensors):
                every = acts if register.per_step else 1
                places[name] = _Source(name, register.id, position, every)
        out = []
        for name in _reads(actor):
            if name in self.variables:
                out.append(_Source(name, None))
            else:
                out.append(places[name])
        return tuple(out)

    def _ports(self, actor: Actor, registers: Sequence[int]) -> tuple[_Port, ...]:
        """Those whose versions come and go: variables are updated in place."""
        acts = self.plan.acts_per_step(actor)
        return tuple(
            _Port(r.id, acts if r.per_step else 1, r.tensors, len(r.readers))
            for r in (self.plan.registers[k] for k in registers)
            if not r.initial
        )

    # ------------------------------------------------------------------ acts

    def inputs(self, actor: Actor, act: int) -> Values:
        """The tensors that an act reads, in the order of its work."""
        return [
            self.variables[s.name]
            if s.register is None
            else self.slots[s.register, act // s.every][s.position]
            for s in self.sources[actor.id]
        ]

    def compute(self, actor: Actor, act: int) -> None:
        """Run one act of an actor that needs no other rank."""
        match actor.work:
            case RegionWork():
                self._region(actor, actor.work, act)
            case PrepareWork() | FeedWork():
                self.store(actor, act, self.supply(actor, act, self.inputs(actor, act)))
            case ReportWork(results):
                values = dict(zip(_reads(actor), self.inputs(actor, act), strict=True))
                self.results[act] = {name: values[tensor].tolist() for name, tensor in results}
            case other:
                raise AssertionError(other)
        self.acts[actor.id] = act + 1

    def _region(self, actor: Actor, work: RegionWork, act: int) -> None:
        inputs = self.inputs(actor, act)
        self._give_up(actor, act)
        values = self.kernels[actor.id](inputs)
        made = dict(zip((*work.makes, *(new for _, new in work.updates)), values, strict=True))
        for variable, new in work.updates:
            if made[new] is not self.variables[variable]:
                self.variables[variable].copy_(made[new])
        self.store(actor, act, made)

    def _give_up(self, actor: Actor, act: int) -> None:
        """Empty the slots that only this act will still read: its kernel frees them as it goes."""
        for port in self.read[actor.id]:
            key = (port.register, act // port.every)
            if (act + 1) % port.every == 0 and self.left[key] == 1:
                self.slots[key] = []

    def supply(self, actor: Actor, act: int, inputs: Sequence[Any]) -> dict[str, Any]:
        """What an act of a reader makes.  Neither buffers nor variables are touched: it may run in
        a thread of its own.
        """
        match actor.work:
            case PrepareWork(step=name, made=made, feeds=feeds):
                step, micro_batch = divmod(act, self.plan.micro_batches)
                samples = inputs[0] if inputs else None
                rows = self._rows(_fields_of(feeds))
                return {made: self._samples.prepare(name, samples, step, micro_batch, rows)}
            case FeedWork(feeds) as work:
                own = {f.tensor: self._number(f, actor, act) for f in feeds if _is_own(f)}
                return {**own, **self._fields(work, act, inputs)}
        raise AssertionError(actor.work)

    @property
    def _samples(self) -> Samples:
        return cast(Samples, self.batches)

    def _number(self, feed: Feed, actor: Actor, act: int) -> torch.Tensor:
        """A number of the engine's own, as a scalar."""
        step, micro_batch = divmod(act, self.plan.acts_per_step(actor))
        value: float
        match feed.field:
            case "@step":
                value = step + 1
            case "@draw":
                value = step * self.plan.micro_batches + micro_batch
            case _ if feed.values:
                value = feed.values[min(step, len(feed.values) - 1)]
            case other:
                raise AssertionError(other)
        return torch.tensor(value, dtype=self._dtype(feed), device=self.device)

    def _dtype(self, feed: Feed) -> torch.dtype:
        return self.plan.graph.tensors[feed.tensor].dtype

    def _held(self, feed: Feed) -> Slices:
        shape = self.plan.graph.tensors[feed.tensor].shape
        return local_slices(shape, feed.nd_sbp, self.grid, self.coordinate)

    def _rows(self, feeds: Sequence[Feed]) -> slice:
        """Samples of a micro-batch of which this rank holds fields."""
        held = [self._held(feed)[0] for feed in feeds]
        return slice(min(start for start, _ in held), max(map(sum, held)))

    def _fields(self, work: FeedWork, act: int, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """What this rank holds of the batch's fields.  samples: prepared ones, if any."""
        feeds = _fields_of(work.feeds)
        if not feeds:
            return {}
        rows = self._rows(feeds)
        step, micro_batch = divmod(act, self.plan.micro_batches)
        if samples:
            batch = self._samples.collate(samples[0])
        elif work.unprepared:
            batch = self._samples.at_once(step, micro_batch, rows)
        else:
            batch = self.batches(step, micro_batch, rows)
        out = {}
        for feed in feeds:
            (start, length), *rest = self._held(feed)
            value = cut(batch[feed.field], ((start - rows.start, length), *rest))
            out[feed.tensor] = value.to(self.device, non_blocking=True)
        return out

    def store(self, actor: Actor, act: int, made: Mapping[str, torch.Tensor]) -> None:
        """Put what an act made into the slots of its registers; sums over micro-batches are added
        in place, collected rows put one behind the other.
        """
        for port in self.filled[actor.id]:
            key = (port.register, act // port.every)
            if act % port.every == 0:
                values = [made[name] for name in port.tensors]
                if port.every > 1:
                    values = list(map(self._begun, port.tensors, values, repeat(port.every)))
                self.slots[key] = values
                self.left[key] = port.num_readers
                live = self.live[port.register] = self.live.get(port.register, 0) + 1
                self.most_live[port.register] = max(live, self.most_live.get(port.register, 0))
            else:
                for total, name in zip(self.slots[key], port.tensors, strict=True):
                    part = made[name]
                    if total.shape == part.shape:
                        total.add_(part)
                    else:
                        total.narrow(0, act % port.every * len(part), len(part)).copy_(part)

    def _begun(self, name: str, part: torch.Tensor, acts: int) -> torch.Tensor:
        """What the first of a step's values begins: a sum, or a row of parts (flow.collect)."""
        if self.plan.graph.producer[name].target != "flow.collect":
            return part.clone()
        total = part.new_empty((acts * len(part), *part.shape[1:]))
        total.narrow(0, 0, len(part)).copy_(part)
        return total

    def release(self, actor: Actor, act: int) -> None:
        """An act has ended: drop the versions that it was the last to read."""
        for port in self.read[actor.id]:
            if (act + 1) % port.every == 0:
                key = (port.register, act // port.every)
                self.left[key] -= 1
                if not self.left[key]:
                    del self.left[key], self.slots[key]
                    self.live[port.register] -= 1

    def layouts(self, actor: Actor) -> list[Layout]:
        """How the tensors of a collective lie on this rank's group."""
        assert isinstance(actor.work, BoxWork)
        if actor.id in self._layouts:
            return self._layouts[actor.id]
        out = self._layouts[actor.id] = []
        for step, (read, made) in zip(actor.work.steps, actor.work.pairs, strict=True):
            op = self.plan.graph.producer[made]
            shape = self.plan.graph.tensors[read].shape
            out.append(layout_of(step, shape, op.in_sbp[0], self.grid, self.coordinate))
        return out


def cut(value: torch.Tensor, slices: Slices) -> torch.Tensor:
    """The slices of a tensor, as a view."""
    for dim, (start, length) in enumerate(slices):
        if (start, length) != (0, value.shape[dim]):
            value = value.narrow(dim, start, length)
    return value


def _is_own(feed: Feed) -> bool:
    """A number of the engine's own."""
    return feed.field.startswith("@")


def _fields_of(feeds: Sequence[Feed]) -> list[Feed]:
    """The feeds that are fields of the batch."""
    return [feed for feed in feeds if not _is_own(feed)]


def _reads(actor: Actor) -> tuple[str, ...]:
    match actor.work:
        case PrepareWork(source=str(source)) | FeedWork(source=str(source)):
            return (source,)
        case RegionWork(reads=reads):
            return reads
        case BoxWork(pairs=pairs):
            return tuple(read for read, _ in pairs)
        case TransferWork(pairs=pairs) if actor.kind == "send":
            return tuple(sent for sent, _ in pairs)
        case ReportWork(results):
            return tuple(dict.fromkeys(tensor for _, tensor in results))
    return ()
