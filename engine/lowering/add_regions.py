"""add_regions: which ops of the boxed graph run together as one program.

A region is a set of ops of one stage and phase with the same (run, depth):

    run     a stretch of ops of one block of the model, in topological order: regions end where
            blocks end, so that what crosses links starts early and equal blocks make equal programs
    depth   the number of moving boxings before an op: no region waits for communication inside

Both only grow along every edge, so regions form a graph without cycles.  An op that waits for
nothing but weights or numbers of the step sinks to the region that first needs it, as a view does:
else the masks of all blocks would be drawn before the first block runs.

The squares of gradients, of which updates wait for the sum, are of no block and sink to where they
are added: one act of a stage, and not one of each block.  The loss goes with their message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowrun.engine.actors.plan import REGION, Actor, Plan, RegionWork
from flowrun.engine.ir.graph import COUNT, PHASES, UPDATE, WEIGHTS, LogicalGraph, Op
from flowrun.engine.ir.module_path import unit_of
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.lowering.lower import set_actors
from flowrun.engine.ops.flow.structure import BOX, TO_DEVICE, TO_HOST, TRANSFER
from flowrun.engine.ops.flow.update import SUMSQ
from flowrun.engine.ops.traits import has, is_view
from flowrun.engine.strategy import Strategy

RegionKey = tuple[int, int, int, int]  # stage, phase, run, depth
Place = tuple[int, int]  # run, depth


@dataclass(frozen=True, slots=True)
class Region:
    """Ops that one program runs.

    key: stage, index of the phase, run, depth.
    unit: the block of the model that the ops come from; "a..b" where chains were joined.
    ops: in topological order.
    """

    key: RegionKey
    unit: str
    ops: tuple[Op, ...]

    @property
    def name(self) -> str:
        _, phase, run, depth = self.key
        return f"{self.unit}.{PHASES[phase]}.{run}.{depth}"


def add_regions(plan: Plan, strategy: Strategy) -> Plan:
    """A pass: an actor for each region."""
    return set_regions(plan, form_regions(plan.graph))


def read_regions(plan: Plan) -> Iterable[Region]:
    """Read the regions of a plan of level regions back from its actors, in order."""
    for actor in plan.actors:
        assert isinstance(actor.work, RegionWork), actor
        unit, phase, run, depth = actor.name.rsplit(".", 3)
        key = (actor.stage, PHASES.index(phase), int(run), int(depth))
        yield Region(key, unit, actor.work.ops)


def set_regions(plan: Plan, regions: Sequence[Region]) -> Plan:
    """Return the plan with one actor a region; together they have all ops that are not
    communication.
    """
    graph = plan.graph
    region_of = {op.name: k for k, region in enumerate(regions) for op in region.ops}
    maker = {name: region_of.get(op.name) for op in graph.ops for name in op.makes}
    wanted = {tensor for _, tensor in graph.results}
    for op in graph.ops:
        here = region_of.get(op.name)
        wanted.update(name for name in op.inputs if here is None or maker.get(name) != here)
    new_of = {v.new: v.tensor for v in graph.variables if v.new}

    def actor(k: int, region: Region) -> Actor:
        ops, makes = region.ops, [name for op in region.ops for name in op.makes]
        read = dict.fromkeys(name for op in ops for name in op.inputs)
        work = RegionWork(
            ops=ops,
            reads=tuple(n for n in read if maker.get(n) != k),
            makes=tuple(n for n in makes if n in wanted and n not in new_of),
            accumulates=_sums(ops),
            updates=tuple((new_of[n], n) for n in makes if n in new_of),
            sent=tuple(n for n in makes if _is_only_sent(graph, n)),
        )
        stage, phase, *_ = region.key
        return Actor(
            k, region.name, REGION, stage, phase=PHASES[phase], per_step=ops[0].per_step, work=work
        )

    return set_actors(plan, (actor(k, region) for k, region in enumerate(regions)))


def _sums(ops: Iterable[Op]) -> tuple[str, ...]:
    return tuple(name for op in ops if has(op.target, Trait.SUM) for name in op.makes)


def _is_only_sent(graph: LogicalGraph, name: str) -> bool:
    """True if boxings alone read it: a message is written row by row, however its tensors lie."""
    readers = graph.consumers.get(name, ())
    return bool(readers) and all(reader.target == BOX for reader in readers)


def is_communication(op: Op) -> bool:
    """True if the op moves bytes between ranks or memories, and so is done by an actor of its
    own.
    """
    return op.target in (TRANSFER, TO_DEVICE, TO_HOST) or (op.target == BOX and op.args[1].moves)


def form_regions(graph: LogicalGraph) -> tuple[Region, ...]:
    runs, counts = _number_runs(graph), tensors_of_counts(graph)
    depths = _sink(graph, runs, _count_depths(graph, counts))
    places = {name: (run, depths[name]) for name, run in runs.items()}
    places |= _join_sums(graph, places)
    members: dict[RegionKey, list[Op]] = {}
    for op in graph.ops:
        if not is_communication(op):
            key = (op.stage, PHASES.index(op.phase), *places[op.name])
            members.setdefault(key, []).append(op)
    regions = tuple(Region(key, _unit_of_ops(ops), tuple(ops)) for key, ops in members.items())
    late = {r.key: counts.isdisjoint(n for op in r.ops for n in op.makes) for r in regions}
    return tuple(sorted(regions, key=lambda r: (late[r.key], r.key[3], *r.key[1:3], r.key[0])))


def tensors_of_counts(graph: LogicalGraph) -> frozenset[str]:
    """Tensors that are made of counts before a step's first forward (passes/count_step.py)."""
    counts: set[str] = set()
    for op in graph.ops:
        if op.phase == COUNT or (op.phase == WEIGHTS and not counts.isdisjoint(op.inputs)):
            counts.update(op.makes)
    return frozenset(counts)


def _unit_of_ops(ops: list[Op]) -> str:
    own = (op.module for op in ops if op.target not in (SUMSQ, BOX))
    return next((unit_of(module) for module in own if module), "step")


def _number_runs(graph: LogicalGraph) -> dict[str, int]:
    """Number the runs: op -> number.  For each stage, phase and chunk the number grows where the
    block changes, to one that no other chunk has.
    """
    current: dict[tuple[int, str, int], tuple[str, int]] = {}
    count: dict[tuple[int, str], int] = {}
    runs: dict[str, int] = {}
    run_of: dict[str, tuple[tuple[int, str], int]] = {}
    for op in graph.ops:
        if is_communication(op):
            continue
        group, chunk = (op.stage, op.phase), (op.stage, op.phase, op.chunk)
        unit, number = current.get(chunk, ("", -1))
        here = unit_of(op.module) if op.module and not _is_squared(graph, op) else unit
        makers = (run_of[name] for name in op.inputs if name in run_of)
        least = max((run for where, run in makers if where == group), default=0)
        if number < least or (here != unit and unit):
            number = count.get(group, 0)
            count[group] = number + 1
        current[chunk] = (here, number)
        runs[op.name] = number
        run_of.update(dict.fromkeys(op.makes, (group, number)))
    return runs


def _count_depths(graph: LogicalGraph, counts: frozenset[str]) -> dict[str, int]:
    """Count the moving boxings before each op; counts of the step are there already for what reads
    them with every micro-batch.
    """
    depth_of: dict[str, int] = {}
    depths: dict[str, int] = {}
    for op in graph.ops:
        early = op.phase in (COUNT, WEIGHTS)
        waited = (name for name in op.inputs if early or name not in counts)
        depth = max((depth_of.get(name, 0) for name in waited), default=0)
        depths[op.name] = depth
        for name in op.makes:
            depth_of[name] = depth + is_communication(op)
    return depths


def _sink(graph: LogicalGraph, runs: dict[str, int], depths: dict[str, int]) -> dict[str, int]:
    """Give views, ops that wait for weights or numbers of a step only, and squares of gradients,
    with what is cut for them, the depth of their first reader in the same run.
    """
    out = dict(depths)
    reported = {tensor for _, tensor in graph.results}
    numbers = {feed.tensor for feed in graph.feeds if feed.field.startswith("@")}
    there = graph.of_weights | graph.variable_of.keys() | numbers
    for op in reversed(graph.ops):
        if is_communication(op) or reported.intersection(op.makes):
            continue
        readers = _readers(graph, op)
        free = is_view(op.target) or there.issuperset(op.inputs)
        free |= _is_squared(graph, op)
        same = all(
            not is_communication(r)
            and (r.stage, r.phase, runs[r.name]) == (op.stage, op.phase, runs[op.name])
            for r in readers
        )
        if free and readers and same:
            out[op.name] = min(out[reader.name] for reader in readers)
    return out


def _join_sums(graph: LogicalGraph, places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the places of ops that go with the squares of gradients, so that one message takes
    all: those of which nothing but a report learns, as of the loss.
    """
    reported = {tensor for _, tensor in graph.results}
    for op in reversed(graph.ops):
        if is_communication(op) and reported.issuperset(op.makes):
            reported.update(op.inputs)
    sums = {op.stage: places[op.name] for op in graph.ops if op.target == SUMSQ}
    return {
        op.name: max(sums[op.stage], places[op.name], key=lambda place: place[1])
        for op in graph.ops
        if op.phase == UPDATE
        and not is_communication(op)
        and op.stage in sums
        and all(map(is_communication, _readers(graph, op)))
        and reported.issuperset(op.makes)
    }


def _readers(graph: LogicalGraph, op: Op) -> list[Op]:
    return [reader for name in op.makes for reader in graph.consumers.get(name, ())]


def _is_squared(graph: LogicalGraph, op: Op) -> bool:
    """True of the squares of a gradient, and of what is cut out of it for them alone."""
    readers = _readers(graph, op)
    alone = bool(readers) and all(reader.target == SUMSQ for reader in readers)
    return op.target == SUMSQ or alone
