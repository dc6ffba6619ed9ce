"""Plan: who does what.  Actors, registers and channels of every rank, as data that prints as text.

All ranks of a stage run the same actors and differ by their coordinate alone, so the plan holds
each stage once and a rank is (stage, coordinate): planning is flat in the number of ranks.  Made by
lower.py; run by rehearsal/ and runtime/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

import torch

from flowrun.engine.actors.protocol import Ring
from flowrun.engine.actors.schedules import ONE_STAGE, Schedule
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.boxing.crossing import Send, route
from flowrun.engine.ir.graph import COUNT, Feed, LogicalGraph, LogicalTensor, Op, Variable
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.placement import Placement, Shape, largest_shape

# levels, each with what it adds (pipeline.py has the passes that lead to each)
REGIONS = "regions"  # ops that run with no communication between them are one actor
ACTORS = "actors"  # + readers of the batch, communication, reports; what each act costs
REGISTERS = "registers"  # + the buffers between actors
BUFFERS = "buffers"  # + results that are written over what nobody reads any more
ORDER = "order"  # + the order of collectives, which the rehearsal finds
PLAN_LEVELS = (REGIONS, ACTORS, REGISTERS, BUFFERS, ORDER)

READER, REGION, BOX, SEND, RECEIVE, REPORT = "reader", "region", "box", "send", "receive", "report"
COPY = "copy"
COMMUNICATION = (BOX, SEND, RECEIVE)

Orders = tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...]  # see Plan.order
Counts = tuple[tuple[int, ...], ...]  # by stage, and by the places of its order


@dataclass(frozen=True, slots=True)
class PrepareWork:
    """A step that makes samples on the host, as a list of whatever the data set makes.

    source: what the step before made; None for the first.  feeds: say which samples.
    """

    step: str
    source: str | None
    made: str
    feeds: tuple[Feed, ...]


@dataclass(frozen=True, slots=True)
class FeedWork:
    """Supplies fields of one micro-batch (or @step), cut to what the rank holds, on its device.

    source: the samples, where actors before have prepared them.  unprepared: these fields can be
    had without the rest of their samples.
    """

    feeds: tuple[Feed, ...]
    source: str | None = None
    unprepared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionWork:
    """Ops that run with no communication between them: one program.

    reads, makes: tensors from and for registers.
    accumulates: those made that are summed over the acts of a step.
    updates: (variable's tensor, tensor that it becomes).
    overwrites: (tensor made, tensor read in whose memory it is written): reuse_buffers.py.
    sent: tensors made that boxings alone read: they may lie in any order of memory.
    """

    ops: tuple[Op, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    accumulates: tuple[str, ...] = ()
    updates: tuple[tuple[str, str], ...] = ()
    overwrites: tuple[tuple[str, str], ...] = ()
    sent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMove:
    """A tensor that communication moves from one location to another.

    read, made: its names before and after.  shape: logical, in elements.
    """

    read: str
    made: str
    shape: Shape
    dtype: torch.dtype
    source: Location
    target: Location

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BoxWork:
    """A collective over an axis of the stage's grid, for a bucket of tensors.

    steps: one for each move, of one axis, kind and reduction; the dims that they split may differ.
    one_copy: what is read are pieces of what is made, in memory that the group shares: no byte
        moves (share_weights.py).
    """

    steps: tuple[BoxingStep, ...]
    moves: tuple[TensorMove, ...]
    one_copy: bool = False

    @property
    def step(self) -> BoxingStep:
        """The first step: its axis, kind and reduction are those of all."""
        return self.steps[0]


@dataclass(frozen=True, slots=True)
class TransferWork:
    """Tensors that cross from one stage to another.  channel: names both ends.

    Which rank sends what to which follows from the moves and the placements (Plan.routes): spelt
    out it would grow with the number of ranks.
    """

    channel: int
    source_stage: int
    target_stage: int
    moves: tuple[TensorMove, ...]


@dataclass(frozen=True, slots=True)
class ReportWork:
    """Scalars that the step reports: (name, tensor)."""

    results: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CopyWork:
    """Tensors that are copied between the memories of a rank: (tensor, its copy).

    updates: (variable's tensor, tensor that it becomes), of copies to the host.
    """

    copies: tuple[tuple[str, str], ...]
    updates: tuple[tuple[str, str], ...] = ()


Work = PrepareWork | FeedWork | RegionWork | BoxWork | TransferWork | CopyWork | ReportWork


@dataclass(frozen=True, slots=True)
class Actor:
    """The owner of one piece of work on each rank of a stage.

    per_step: acts once a step instead of once a micro-batch.
    inputs, outputs: register ids.
    seconds: foreseen, of one act.
    sent_bytes: of all ranks of the stage, in one act.
    level: of communication, the outermost of the network that it crosses (hardware/network.py).
    taken: of communication, the share of compute that it takes while it runs (Level.taken).
    crowding_s: of communication, what of `seconds` it waits only while others have the cores.
    """

    id: int
    name: str
    kind: str
    stage: int
    _: KW_ONLY
    phase: str
    per_step: bool
    work: Work
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    seconds: float = 0.0
    sent_bytes: float = 0.0
    level: int = 0
    taken: float = 0.0
    crowding_s: float = 0.0

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that its work reads."""
        match self.work:
            case RegionWork(reads=reads):
                return reads
            case BoxWork(moves=moves) | TransferWork(moves=moves) if self.kind != RECEIVE:
                return tuple(move.read for move in moves)
            case FeedWork(source=str(source)) | PrepareWork(source=str(source)):
                return (source,)
            case CopyWork(copies):
                return tuple(source for source, _ in copies)
            case ReportWork(results):
                return tuple(dict.fromkeys(tensor for _, tensor in results))
        return ()

    @property
    def makes(self) -> tuple[str, ...]:
        """Tensors that its work makes, new values of variables among them."""
        match self.work:
            case RegionWork(makes=makes, updates=updates):
                return (*makes, *(new for _, new in updates))
            case BoxWork(moves=moves) | TransferWork(moves=moves) if self.kind != SEND:
                return tuple(move.made for move in moves)
            case FeedWork(feeds=feeds):
                return tuple(feed.tensor for feed in feeds)
            case PrepareWork(made=made):
                return (made,)
            case CopyWork(copies):
                return tuple(made for _, made in copies)
        return ()

    @property
    def sums(self) -> tuple[str, ...]:
        """Tensors that it makes once a step though it acts with every micro-batch."""
        return self.work.accumulates if isinstance(self.work, RegionWork) else ()

    @property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """(variable's tensor, tensor that it becomes), of the variables that its acts change."""
        return self.work.updates if isinstance(self.work, RegionWork | CopyWork) else ()

    @property
    def computes(self) -> bool:
        """True if acts take turns on the rank's compute: not of communication, nor in a thread."""
        return self.kind not in (BOX, SEND, RECEIVE) and not self.runs_in_thread

    @property
    def paces(self) -> bool:
        """True if its acts count in `due` and `ended` of Plan: compute, but not counts, which run a
        step ahead.
        """
        return self.computes and self.phase != COUNT

    @property
    def runs_in_thread(self) -> bool:
        """True if acts run in a thread next to the rank's compute."""
        return self.makes_batches or self.kind == COPY

    @property
    def makes_batches(self) -> bool:
        """True if acts make batches ready; numbers of the engine itself take no time."""
        feeds = self.work.feeds if isinstance(self.work, FeedWork) else ()
        return isinstance(self.work, PrepareWork) or not all(feed.is_own for feed in feeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A ring of `slots` buffers that one actor fills and others read.

    tensors: what one slot holds; none where the register only holds a reader back.
    producer: None for constants.
    per_step: changes once a step.
    initial: versions before the first act (weights).
    num_bytes: of one slot, on the rank with the largest shards.
    stash: waits for backward; its slots are the stage's micro-batches in flight.
    """

    id: int
    name: str
    stage: int
    tensors: tuple[str, ...]
    producer: int | None
    readers: tuple[int, ...]
    slots: int
    per_step: bool
    initial: int = 0
    num_bytes: int = 0
    stash: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the ranks do in a step.

    A rank needs nothing else: what it runs, and the shapes and locations of all tensors, stand
    here.

    graph: the boxed logical graph that it was made of: for passes, costs and reports.
    tensors: logical shape and dtype of every tensor, by name; locations: where it enters or is
        made; variables: those that live from step to step.
    schedule: which acts of a stage go first; its chunks.
    order: (stage, queue) -> the order in which the communication of that queue is issued within a
        step, as (actor, act of the step); found by the rehearsal, the same on all ranks of the
        stage.
    one_order: all communication of a rank is one queue (rehearsal/launches.py); else each axis has
        a queue, and messages between stages have none.
    due: stage -> for each place in its one order, if a receive stands there, how many acts of
        compute of the step must have begun before it is launched.
    ended: stage -> for each place in its one order, if a collective of a micro-batch stands there,
        how many acts of compute of the step had begun when it ended in the rehearsal.
    shared_memory: messages lie in memory that the ranks share; what they take of it is counted so.
    core, cores, own_messages, workspace: see Hardware.
    host_apart: a rank's device has memory of its own; a CPU has its host's.
    blocking: axes whose collectives take turns with compute; their order is one, that of the first.
    """

    placements: tuple[Placement, ...]
    axes: tuple[str, ...]
    graph: LogicalGraph
    actors: tuple[Actor, ...]
    registers: tuple[Register, ...]
    micro_batches: int
    schedule: Schedule = ONE_STAGE
    order: Orders = ()
    notes: tuple[str, ...] = ()
    shared_memory: bool = False
    core: float = 1.0
    cores: float = math.inf
    host_apart: bool = False
    own_messages: bool = False
    workspace: Mapping[str, float] = field(default_factory=dict, hash=False)
    blocking: tuple[int, ...] = ()
    one_order: bool = False
    due: Counts = ()
    ended: Counts = ()
    tensors: Mapping[str, LogicalTensor] = field(default_factory=dict, hash=False)
    variables: Mapping[str, Variable] = field(default_factory=dict, hash=False)
    locations: Mapping[str, Location] = field(default_factory=dict, hash=False)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return len({rank for placement in self.placements for rank in placement.ranks})

    def stage_of(self, rank: int) -> int:
        """The stage that a rank belongs to."""
        return next(stage for stage, placement in enumerate(self.placements) if rank in placement)

    def blocks(self, actor: Actor) -> bool:
        """Return whether an actor is a collective during which nothing computes."""
        return isinstance(actor.work, BoxWork) and actor.work.step.axis in self.blocking

    def foresees_end(self, actor: Actor) -> bool:
        """Return whether `ended` says of an actor when its acts end."""
        return self.one_order and isinstance(actor.work, BoxWork) and not actor.per_step

    def queue(self, actor: Actor) -> int:
        """Return the number of the queue in whose order an actor is issued (`queues`), or -1."""
        if self.one_order:
            return len(self.axes) if actor.kind in COMMUNICATION else -1
        if not isinstance(actor.work, BoxWork):
            return -1
        return self.blocking[0] if self.blocks(actor) else actor.work.step.axis

    @property
    def queues(self) -> tuple[str, ...]:
        """The names of the queues: of each axis, and of all communication."""
        return (*(f"axis {axis}" for axis in self.axes), "all communication")

    def acts_per_step(self, actor: Actor) -> int:
        """Return 1, or the number of micro-batches."""
        return 1 if actor.per_step else self.micro_batches

    def routes(self, work: TransferWork) -> tuple[tuple[Send, ...], ...]:
        """Return the slices that ranks send to ranks, for each move of a transfer."""
        source, target = (self.placements[s] for s in (work.source_stage, work.target_stage))
        return tuple(
            route(source, move.source.nd_sbp, target, move.target.nd_sbp, move.shape)
            for move in work.moves
        )

    @cached_property
    def channel_ends(self) -> Mapping[int, Sequence[int]]:
        """Channel -> the actors that send and receive over it."""
        ends: dict[int, list[int]] = {}
        for actor in self.actors:
            if isinstance(actor.work, TransferWork):
                ends.setdefault(actor.work.channel, []).append(actor.id)
        return ends

    def tensor_bytes(self, name: str) -> int:
        """Return the bytes of a tensor on the rank with its largest shard."""
        stage, nd_sbp = self.locations[name]
        tensor = self.tensors[name]
        shape = largest_shape(tensor.shape, nd_sbp, self.placements[stage].shape)
        return math.prod(shape) * tensor.dtype.itemsize

    def stage_actors(self, stage: int) -> tuple[Actor, ...]:
        """Return the actors that every rank of a stage runs."""
        return tuple(actor for actor in self.actors if actor.stage == stage)

    def rings(self, stage: int) -> tuple[Ring, ...]:
        """Return a stage's registers for the protocol; constants can always be read."""
        return tuple(
            Ring(r.id, r.producer, r.readers, r.slots, per_step=r.per_step, initial=r.initial)
            for r in self.registers
            if r.stage == stage and r.producer is not None
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The plan as text, one actor or register a line."""
        for stage, placement in enumerate(self.placements):
            yield f"stage {stage}: {placement}"
            for variable in (v for v in self.variables.values() if v.stage == stage):
                sbp = ", ".join(map(str, variable.nd_sbp)) or "whole"
                shape = self.tensors[variable.tensor].shape
                own = ", each rank's own" if variable.own else ""
                yield f"  {variable.kind} {variable.name} {shape} {sbp}{own}"
            for actor in self.stage_actors(stage):
                yield from self._actor_lines(actor)
        for note in self.notes:
            yield f"note: {note}"

    def _actor_lines(self, actor: Actor) -> Iterator[str]:
        rate = "step" if actor.per_step else "micro-batch"
        yield f"  actor {actor.id} {actor.kind} {actor.name} [{actor.phase}, each {rate}]"
        for r in (self.registers[i] for i in actor.inputs):
            yield f"    reads register {r.id} from {'-' if r.producer is None else r.producer}"
        yield from self._work_lines(actor)
        for r in (self.registers[i] for i in actor.outputs):
            readers = ", ".join(map(str, r.readers)) or "-"
            kind, tensors = "stash " if r.stash else "", ", ".join(r.tensors)
            filled = f"{kind}register {r.id} x{r.slots} {r.num_bytes} bytes"
            yield f"    fills {filled} -> {readers}: {tensors}"

    def _work_lines(self, actor: Actor) -> Iterator[str]:
        match actor.work:
            case RegionWork() as work:
                yield from (f"      {op}" for op in work.ops)
            case BoxWork(steps, moves, one_copy):
                where = ", in one copy" if one_copy else ""
                for step, move in zip(steps, moves, strict=True):
                    change = f"{self.axes[step.axis]}: {step.source} -> {step.target}"
                    yield f"      %{move.made} = {step.kind}(%{move.read}) on {change}{where}"
            case TransferWork(channel, source, target, moves):
                where = f"channel {channel}, stage {source} -> {target}"
                yield from (f"      {where}: %{move.read} -> %{move.made}" for move in moves)
            case CopyWork(copies):
                yield from (f"      %{made} = copy(%{source})" for source, made in copies)
            case PrepareWork(step=step, made=made):
                yield f"      %{made} = {step}({'%'.join(('', *actor.reads))})"
            case FeedWork(feeds):
                for feed in feeds:
                    yield f"      %{feed.tensor} = {feed.field} {', '.join(map(str, feed.nd_sbp))}"
            case ReportWork(results):
                yield from (f"      {name} = %{tensor}" for name, tensor in results)
