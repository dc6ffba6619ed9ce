"""lower: boxed graph -> Plan.  Regions, boxings, readers and reports become actors; what passes
between them, registers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flowrun.engine.actors.draft import Draft
from flowrun.engine.actors.plan import (
    BOX,
    READER,
    RECEIVE,
    REGION,
    REPORT,
    SEND,
    Actor,
    BoxWork,
    FeedWork,
    Plan,
    PrepareWork,
    RegionWork,
    ReportWork,
    TransferWork,
)
from flowrun.engine.boxing.boxing import BoxingStep, exchange_if_small
from flowrun.engine.cost.actor_cost import ActorCost
from flowrun.engine.ir.graph import (
    COUNT,
    FORWARD,
    PHASES,
    UPDATE,
    Feed,
    LogicalGraph,
    LogicalTensor,
    Op,
)
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.lowering.form_regions import form_regions, moves
from flowrun.engine.lowering.merge_chains import merge_chains
from flowrun.engine.lowering.registers import connect
from flowrun.engine.lowering.shared_weights import one_copy
from flowrun.engine.ops.flow.structure import TRANSFER
from flowrun.engine.ops.op_info import Trait
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy


def lower(graph: LogicalGraph, strategy: Strategy) -> Plan:
    """Actors and registers of every stage.  Raises RecipeError for an unknown schedule."""
    return _Lowering(graph, strategy).plan()


class _Lowering:
    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.graph = graph
        self.strategy = strategy
        self.drafts: list[Draft] = []
        self.maker: dict[str, int] = {}  # tensor -> draft that makes it
        self.layout: dict[str, tuple[int, NdSbp]] = {}  # tensor -> (stage, nd-SBP)
        for source in graph.sources:
            self.layout[source.tensor] = (source.stage, source.nd_sbp)
        for op in graph.ops:
            for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=True):
                if name is not None:
                    self.layout[name] = (op.stage, nd_sbp)

    def plan(self) -> Plan:
        """Drafts first, then registers between them."""
        self._readers()
        self._regions()
        self._boxings()
        self._reports()
        if self.strategy.shared_memory:
            grids = [placement.shape for placement in self.strategy.placements]
            self.drafts = one_copy(self.drafts, self.graph, grids)
        cost = ActorCost(self.graph, self.strategy, self.layout)
        registers, inputs, outputs = connect(self.drafts, self.maker, self.graph, cost)
        actors = tuple(
            Actor(
                k,
                d.name,
                d.kind,
                d.stage,
                d.phase,
                d.per_step,
                d.work,
                tuple(inputs[k]),
                tuple(outputs[k]),
                cost.seconds(d),
                cost.sent_bytes(d),
                *cost.carrier(d),
            )
            for k, d in enumerate(self.drafts)
        )
        return Plan(
            self.strategy.placements,
            self.strategy.axes,
            self.graph,
            actors,
            registers,
            self.strategy.micro_batches,
            self.strategy.chunks,
            notes=self.graph.notes,
            shared_memory=self.strategy.shared_memory,
            core=self.strategy.hardware.core,
            cores=self.strategy.hardware.cores,
            own_messages=self.strategy.hardware.own_messages,
            workspace=self.strategy.hardware.workspace,
            blocking=tuple(map(self.strategy.axes.index, self.strategy.blocking)),
        )

    # ------------------------------------------------------------------ drafts

    def _add(self, draft: Draft) -> int:
        self.drafts.append(draft)
        for name in draft.makes:
            self.maker[name] = len(self.drafts) - 1
        return len(self.drafts) - 1

    def _readers(self) -> None:
        for stage in range(self.strategy.num_stages):
            for per_step in (False, True):
                found = tuple(
                    f for f in self.graph.feeds if f.stage == stage and f.per_step == per_step
                )
                for feeds in self._together(found):
                    made = tuple(f.tensor for f in feeds)
                    name = "step" if per_step else "batch"
                    phase = UPDATE if per_step else FORWARD
                    fields = {feed.field for feed in feeds if not feed.is_own}
                    unprepared = bool(fields) and fields <= set(self.strategy.unprepared)
                    chain = bool(fields) and bool(self.strategy.preparation) and not unprepared
                    source = self._prepared(stage, feeds) if chain else None
                    reads = (source,) if source else ()
                    work = FeedWork(feeds, source, unprepared)
                    self._add(Draft(name, READER, stage, phase, per_step, work, reads, made))

    def _together(self, feeds: tuple[Feed, ...]) -> list[tuple[Feed, ...]]:
        """Feeds that one reader supplies.  Counts of a step read it ahead: they have a reader of
        their own where their fields can be had without the rest of their samples.
        """
        counted = tuple(
            feed
            for feed in feeds
            if any(op.phase == COUNT for op in self.graph.consumers.get(feed.tensor, ()))
        )
        alone = {feed.field for feed in counted} <= set(self.strategy.unprepared)
        parts = (
            (counted, tuple(feed for feed in feeds if feed not in counted)) if alone else (feeds,)
        )
        return [part for part in parts if part]

    def _prepared(self, stage: int, feeds: tuple[Feed, ...]) -> str | None:
        """A chain of actors, one for each step that makes a sample; what the last of them makes.

        Samples are described as a tensor of bytes that lies as the field of which most is held.
        """
        fields = [f for f in feeds if not f.is_own]
        source: str | None = None
        for step in self.strategy.preparation:
            widest = max(fields, key=self._num_samples)
            made = f"batch.{step.name}@{stage}"
            samples = self.graph.tensors[widest.tensor].shape[0]
            described = LogicalTensor(made, (samples, step.num_bytes), torch.uint8)
            self.graph = replace(self.graph, tensors={**self.graph.tensors, made: described})
            self.layout[made] = (stage, widest.nd_sbp)
            work = PrepareWork(step.name, source, made, feeds)
            reads = (source,) if source else ()
            name = f"batch.{step.name}"
            self._add(Draft(name, READER, stage, FORWARD, False, work, reads, (made,)))
            source = made
        return source

    def _num_samples(self, feed: Feed) -> int:
        """Samples of a field that a rank holds."""
        grid = self.strategy.placements[feed.stage].shape
        return largest_shape(self.graph.tensors[feed.tensor].shape, feed.nd_sbp, grid)[0]

    def _regions(self) -> None:
        produced_in: dict[str, int] = {}
        found = form_regions(self.graph)
        regions = merge_chains(self.graph, found, self.strategy.micro_batches)
        for k, region in enumerate(regions):
            produced_in.update({name: k for op in region.ops for name in op.makes})
        wanted = {tensor for _, tensor in self.graph.results}
        for op in self.graph.ops:
            for name in op.inputs:
                if moves(op) or produced_in.get(name) != produced_in.get(
                    op.makes[0] if op.makes else ""
                ):
                    wanted.add(name)
        new_of = {v.new: v.tensor for v in self.graph.variables if v.new}
        for k, region in enumerate(regions):
            made = [name for op in region.ops for name in op.makes]
            reads = tuple(
                dict.fromkeys(n for op in region.ops for n in op.inputs if produced_in.get(n) != k)
            )
            accumulates = tuple(
                n for op in region.ops if has(op.target, Trait.SUM) for n in op.makes
            )
            updates = tuple((new_of[name], name) for name in made if name in new_of)
            stage, phase_index, run, depth = region.key
            phase = PHASES[phase_index]
            self._add(
                Draft(
                    f"{region.unit}.{phase}.{run}.{depth}",
                    REGION,
                    stage,
                    phase,
                    region.ops[0].per_step,
                    RegionWork(
                        region.ops,
                        reads,
                        tuple(n for n in made if n in wanted and n not in new_of),
                        accumulates,
                        updates,
                    ),
                    reads,
                    tuple(n for n in made if n in wanted or n in new_of),
                    frozenset(accumulates),
                )
            )

    def _boxings(self) -> None:
        """Moving boxings that start at the same actor, of one kind, rate and dtype, share one
        message (a bucket).
        """
        buckets: dict[tuple[object, ...], list[Op]] = {}
        where: dict[str, tuple[object, ...]] = {}  # boxed tensor -> bucket
        key: tuple[object, ...]
        for op in (op for op in self.graph.ops if moves(op)):
            (source,) = op.inputs
            start: object = where.get(source, self.maker.get(source, self._variable_home(source)))
            tensor = self.graph.tensors[source]
            if op.target == TRANSFER:
                key = ("transfer", start, op.args[1], op.stage, op.phase, op.chunk)
            else:
                step = op.args[1]
                key = (
                    "box",
                    start,
                    op.stage,
                    step.axis,
                    step.kind,
                    step.reduce,
                    tensor.dtype,
                    op.phase,
                    op.chunk,
                )
            buckets.setdefault(key, []).append(op)
            where[op.makes[0]] = key
        for channel, ops in enumerate(buckets.values()):
            self._bucket(channel, ops)

    def _variable_home(self, tensor: str) -> object:
        """Variables that one region updates travel together; constants by themselves."""
        variable = self.graph.variable_of.get(tensor)
        return (
            ("constant", tensor)
            if variable is None or variable.new is None
            else self.maker[variable.new]
        )

    def _bucket(self, channel: int, ops: list[Op]) -> None:
        first = ops[0]
        pairs = tuple((op.inputs[0], op.makes[0]) for op in ops)
        reads, makes = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
        per_step = first.per_step
        name = first.module or "step"
        if first.target == TRANSFER:
            work = TransferWork(channel, first.args[1], first.stage, pairs)
            title = f"{name}.{work.source_stage}to{work.target_stage}.{first.phase}"
            self._add(
                Draft(
                    f"send.{title}", SEND, work.source_stage, first.phase, per_step, work, reads, ()
                )
            )
            self._add(
                Draft(
                    f"receive.{title}",
                    RECEIVE,
                    work.target_stage,
                    first.phase,
                    per_step,
                    work,
                    (),
                    makes,
                )
            )
        else:
            steps = self._by_size(tuple(op.args[1] for op in ops), reads, first.stage)
            step = steps[0]
            title = f"{step.kind}.{self.strategy.axes[step.axis]}.{name}.{first.phase}"
            self._add(
                Draft(
                    title,
                    BOX,
                    first.stage,
                    first.phase,
                    per_step,
                    BoxWork(steps, pairs),
                    reads,
                    makes,
                )
            )

    def _by_size(
        self, steps: tuple[BoxingStep, ...], reads: tuple[str, ...], stage: int
    ) -> tuple[BoxingStep, ...]:
        """The steps of one message.  Its bytes are those of the rank with the largest shards: all
        ranks have to go the same way.
        """
        cost = ActorCost(self.graph, self.strategy, self.layout)
        link = self.strategy.hardware.links(self.strategy.placements[stage])[steps[0].axis]
        num_bytes = sum(map(cost.tensor_bytes, reads))
        return tuple(exchange_if_small(step, num_bytes, link) for step in steps)

    def _reports(self) -> None:
        by_stage: dict[int, list[tuple[str, str]]] = {}
        for name, tensor in self.graph.results:
            by_stage.setdefault(self.layout[tensor][0], []).append((name, tensor))
        for stage, results in by_stage.items():
            reads = tuple(dict.fromkeys(tensor for _, tensor in results))
            self._add(
                Draft("report", REPORT, stage, UPDATE, True, ReportWork(tuple(results)), reads, ())
            )
