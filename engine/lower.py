"""lower: boxed graph -> Plan.  Regions, boxings, readers and reports become actors; what passes
between them, registers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from flowrun.engine.boxing import path_seconds, route, step_bytes
from flowrun.engine.cost.op_cost import is_view, op_seconds
from flowrun.engine.errors import PlanError
from flowrun.engine.graph import (
    BACKWARD,
    FORWARD,
    PHASES,
    UPDATE,
    WEIGHT_GRAD,
    Feed,
    LogicalGraph,
    Op,
    Variable,
)
from flowrun.engine.passes.form_regions import form_regions, moves
from flowrun.engine.placement import largest_shape
from flowrun.engine.plan import (
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
    RegionWork,
    Register,
    ReportWork,
    TransferWork,
    Work,
)
from flowrun.engine.sbp import NdSbp
from flowrun.engine.strategy import Strategy


def lower(graph: LogicalGraph, strategy: Strategy) -> Plan:
    """Actors and registers of every stage.  Raises PlanError for an unknown schedule."""
    return _Lowering(graph, strategy).plan()


@dataclass
class _Draft:
    """An actor while its registers are not known yet."""

    name: str
    kind: str
    stage: int
    phase: str
    per_step: bool
    work: Work
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    step_makes: frozenset[str] = field(default_factory=frozenset)  # those that it makes once a step


class _Lowering:
    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.graph = graph
        self.strategy = strategy
        self.drafts: list[_Draft] = []
        self.maker: dict[str, int] = {}  # tensor -> draft that makes it
        self.layout: dict[str, tuple[int, NdSbp]] = {}  # tensor -> (stage, nd-SBP)
        sources: tuple[Variable | Feed, ...] = (*graph.variables, *graph.feeds)
        for source in sources:
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
        registers, inputs, outputs = self._connect()
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
                self._seconds(d),
                self._transient(d),
                self._sent(d),
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
            notes=self.graph.notes,
        )

    # ------------------------------------------------------------------ drafts

    def _add(self, draft: _Draft) -> int:
        self.drafts.append(draft)
        for name in draft.makes:
            self.maker[name] = len(self.drafts) - 1
        return len(self.drafts) - 1

    def _readers(self) -> None:
        for stage in range(self.strategy.num_stages):
            for per_step in (False, True):
                feeds = tuple(
                    f
                    for f in self.graph.feeds
                    if f.stage == stage and f.field.startswith("@") == per_step
                )
                if feeds:
                    made = tuple(f.tensor for f in feeds)
                    name = "step" if per_step else "batch"
                    phase = UPDATE if per_step else FORWARD
                    self._add(
                        _Draft(name, READER, stage, phase, per_step, FeedWork(feeds), (), made)
                    )

    def _regions(self) -> None:
        produced_in: dict[str, int] = {}
        regions = form_regions(self.graph)
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
            accumulates = tuple(op.makes[0] for op in region.ops if op.target == "flow.accumulate")
            updates = tuple((new_of[name], name) for name in made if name in new_of)
            stage, phase_index, run, depth = region.key
            phase = PHASES[phase_index]
            self._add(
                _Draft(
                    f"{region.unit}.{phase}.{run}.{depth}",
                    REGION,
                    stage,
                    phase,
                    phase == UPDATE,
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
            if op.target == "flow.transfer":
                key = ("transfer", start, op.args[1], op.stage, op.phase)
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
        per_step = first.phase == UPDATE
        name = first.module or "step"
        if first.target == "flow.transfer":
            work = TransferWork(channel, first.args[1], first.stage, pairs)
            title = f"{name}.{work.source_stage}to{work.target_stage}.{first.phase}"
            self._add(
                _Draft(
                    f"send.{title}", SEND, work.source_stage, first.phase, per_step, work, reads, ()
                )
            )
            self._add(
                _Draft(
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
            steps = tuple(op.args[1] for op in ops)
            step = steps[0]
            title = f"{step.kind}.{self.strategy.axes[step.axis]}.{name}.{first.phase}"
            self._add(
                _Draft(
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

    def _reports(self) -> None:
        by_stage: dict[int, list[tuple[str, str]]] = {}
        for name, tensor in self.graph.results:
            by_stage.setdefault(self.layout[tensor][0], []).append((name, tensor))
        for stage, results in by_stage.items():
            reads = tuple(dict.fromkeys(tensor for _, tensor in results))
            self._add(
                _Draft("report", REPORT, stage, UPDATE, True, ReportWork(tuple(results)), reads, ())
            )

    # ------------------------------------------------------------------ registers

    def _connect(self) -> tuple[tuple[Register, ...], list[list[int]], list[list[int]]]:
        readers: dict[str, list[int]] = {}
        new_of = {v.tensor: v.new for v in self.graph.variables if v.new}
        for k, draft in enumerate(self.drafts):
            for name in draft.reads:
                if name in new_of and self.maker[new_of[name] or ""] == k:
                    continue  # the update reads its own weight in place: it has the credit
                readers.setdefault(name, []).append(k)
        groups: dict[tuple[int | None, bool, tuple[int, ...]], list[str]] = {}
        for name in (*(v.tensor for v in self.graph.variables), *self.maker):
            if name in readers:
                producer = self._producer(name)
                per_step = (
                    producer is None
                    or name in new_of
                    or self.drafts[producer].per_step
                    or (name in self.drafts[producer].step_makes)
                )
                groups.setdefault((producer, per_step, tuple(readers[name])), []).append(name)
        inputs: list[list[int]] = [[] for _ in self.drafts]
        outputs: list[list[int]] = [[] for _ in self.drafts]
        registers: list[Register] = []
        for (producer, per_step, read_by), names in groups.items():
            register = self._register(len(registers), producer, per_step, read_by, tuple(names))
            registers.append(register)
            for reader in read_by:
                inputs[reader].append(register.id)
            if producer is not None:
                outputs[producer].append(register.id)
        self._throttle_gathers(registers, inputs, outputs)
        return tuple(registers), inputs, outputs

    def _throttle_gathers(
        self, registers: list[Register], inputs: list[list[int]], outputs: list[list[int]]
    ) -> None:
        """Gathers of ZeRO 3 run ahead of the regions that read them by register_slots regions.

        Weights are always there to be gathered, so without this every gather of a micro-batch
        would start at once.  An empty register from an earlier reading region holds the later ones.
        """
        readers: dict[tuple[int, str], dict[int, list[int]]] = {}  # stage, phase: region: gathers
        for k, draft in enumerate(self.drafts):
            if self._gathers_weights(draft):
                first = min(r for i in outputs[k] for r in registers[i].readers)
                readers.setdefault((draft.stage, draft.phase), {}).setdefault(first, []).append(k)
        for (stage, _), gathers in readers.items():
            order = sorted(gathers)
            ahead = self.strategy.register_slots
            for before, region in zip(order, order[ahead:], strict=False):
                for gather in gathers[region]:
                    name = f"after {self.drafts[before].name}"
                    control = Register(
                        len(registers), name, stage, (), before, (gather,), 1, per_step=False
                    )
                    registers.append(control)
                    outputs[before].append(control.id)
                    inputs[gather].append(control.id)

    def _gathers_weights(self, draft: _Draft) -> bool:
        variables = self.graph.variable_of
        return draft.kind == BOX and not draft.per_step and all(n in variables for n in draft.reads)

    def _producer(self, name: str) -> int | None:
        variable = self.graph.variable_of.get(name)
        if variable is None:
            return self.maker[name]
        return None if variable.new is None else self.maker[variable.new]

    def _register(
        self,
        id: int,
        producer: int | None,
        per_step: bool,
        readers: tuple[int, ...],
        names: tuple[str, ...],
    ) -> Register:
        stage = self.drafts[readers[0]].stage
        variable = names[0] in self.graph.variable_of
        stash = not variable and not per_step and self._is_stash(producer, readers)
        slots = 1 if per_step else self._in_flight(stage) if stash else self.strategy.register_slots
        if producer is not None and self.drafts[producer].kind == READER:
            slots = max(slots, 2)
        if producer is not None and self._gathers_weights(self.drafts[producer]):
            slots = 1
        label = self.drafts[producer].name if producer is not None else "constant"
        return Register(
            id,
            label,
            stage,
            names,
            producer,
            readers,
            slots,
            per_step,
            int(variable),
            sum(map(self._bytes, names)),
            stash,
        )

    def _is_stash(self, producer: int | None, readers: Iterable[int]) -> bool:
        """Waits for backward (or, from backward, for weight_grad)."""
        made_in = PHASES.index(self.drafts[producer].phase) if producer is not None else 0
        later = {PHASES.index(self.drafts[r].phase) for r in readers}
        return (
            max(later) > made_in
            and made_in < PHASES.index(UPDATE)
            and max(later) <= PHASES.index(WEIGHT_GRAD)
        )

    def _in_flight(self, stage: int) -> int:
        """Credits of a stage's stash: the schedules of design.md section 8 as register counts."""
        stages, m = self.strategy.num_stages, self.strategy.micro_batches
        match self.strategy.in_flight:
            case int(number):
                credits = number
            case "gpipe":
                credits = m
            case "1f1b":
                credits = stages - stage
            case "zero_bubble":
                credits = 2 * stages if stages > 1 else self._single_stage_credits()
            case other:
                raise PlanError(
                    "placement.in_flight",
                    f"{other!r} is no schedule.",
                    "Write a number, gpipe, 1f1b or zero_bubble.",
                )
        return min(credits, m)

    def _single_stage_credits(self) -> int:
        """Two micro-batches in flight where backward waits for collectives, else one."""
        return 2 if any(d.kind == BOX and d.phase == BACKWARD for d in self.drafts) else 1

    # ------------------------------------------------------------------ costs

    def _shape(self, name: str, nd_sbp: NdSbp, stage: int) -> tuple[int, ...]:
        return largest_shape(
            self.graph.tensors[name].shape, nd_sbp, self.strategy.placements[stage].shape
        )

    def _bytes(self, name: str) -> int:
        stage, nd_sbp = self.layout[name]
        return _volume(self._shape(name, nd_sbp, stage)) * self.graph.tensors[name].dtype.itemsize

    def _op_seconds(self, op: Op) -> float:
        ins = [self._shape(n, nd, op.stage) for n, nd in zip(op.inputs, op.in_sbp, strict=True)]
        outs = [
            None if n is None else self._shape(n, nd, op.stage)
            for n, nd in zip(op.outputs, op.out_sbp, strict=True)
        ]
        return op_seconds(op, ins, outs, self.strategy.hardware)

    def _seconds(self, draft: _Draft) -> float:
        hardware = self.strategy.hardware
        match draft.work:
            case RegionWork(ops=ops):
                return hardware.act_s + sum(map(self._op_seconds, ops))
            case BoxWork(steps, pairs):
                grid = self.strategy.placements[draft.stage].shape
                link = replace(hardware.link, latency_s=0.0)
                total = hardware.link.latency_s
                for step, (read, _) in zip(steps, pairs, strict=True):
                    tensor, nd_sbp = self.graph.tensors[read], self.layout[read][1]
                    total += path_seconds(
                        nd_sbp, step.after(nd_sbp), grid, tensor.shape, tensor.num_bytes, link
                    )
                return total
            case TransferWork(pairs=pairs):
                moved = sum(self._bytes(made) for _, made in pairs)
                return hardware.link.latency_s + moved / hardware.link.bytes_per_s
        return hardware.act_s

    def _transient(self, draft: _Draft) -> int:
        """Peak bytes of a region's values that are neither read from nor kept in a register."""
        if not isinstance(draft.work, RegionWork):
            return 0
        ops = draft.work.ops
        last = {name: k for k, op in enumerate(ops) for name in op.inputs}
        kept = set(draft.makes) | set(draft.reads)
        live = peak = 0
        for k, op in enumerate(ops):
            if not is_view(op.target) and op.target not in (
                "flow.adamw",
                "flow.sgd",
                "flow.accumulate",
            ):
                live += sum(self._bytes(n) for n in op.makes if n not in kept)
            peak = max(peak, live)
            for name in set(op.inputs):
                source = self.graph.producer.get(name)
                if (
                    last[name] == k
                    and name not in kept
                    and source is not None
                    and not is_view(source.target)
                ):
                    live -= self._bytes(name)
        return peak

    def _sent(self, draft: _Draft) -> float:
        match draft.work:
            case BoxWork(steps, pairs):
                grid = self.strategy.placements[draft.stage].shape
                return sum(
                    step_bytes(step, self.layout[read][1], grid, self.graph.tensors[read].num_bytes)
                    for step, (read, _) in zip(steps, pairs, strict=True)
                )
            case TransferWork(_, source, target, pairs) if draft.kind == SEND:
                return float(
                    sum(self._route_bytes(source, target, sent, made) for sent, made in pairs)
                )
        return 0.0

    def _route_bytes(self, source: int, target: int, sent: str, made: str) -> int:
        tensor = self.graph.tensors[sent]
        sends = route(
            self.strategy.placements[source],
            self.layout[sent][1],
            self.strategy.placements[target],
            self.layout[made][1],
            tensor.shape,
        )
        return sum(s.num_elements for s in sends if s.source != s.target) * tensor.dtype.itemsize


def _volume(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
