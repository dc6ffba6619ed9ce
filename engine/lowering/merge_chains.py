"""merge_chains: regions that follow one another with no choice between them become one.

Every act costs the loop some time, and every program its call.  A region joins the chain in front
of it if nothing starts later for it:

- it reads what the chain makes, and all else that it reads is there before the chain may begin;
- every boxing that waits for the chain waits for this region, too;
- no act of another micro-batch would go between;
- neither is one of several equal regions, as blocks of a model make: equal programs are compiled
  once.

Weights, what is cast from them once a step, and counts of the step are taken as there: they act
before forward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.graph import BACKWARD, FORWARD, PHASES, WEIGHT_GRAD, WEIGHTS, LogicalGraph
from flowrun.engine.lowering.add_regions import (
    Region,
    is_communication,
    read_regions,
    set_regions,
    tensors_of_counts,
)
from flowrun.engine.lowering.reuse_buffers import find_ancestors
from flowrun.engine.ops.flow.structure import TRANSFER
from flowrun.engine.strategy import Strategy


def merge_chains(plan: Plan, strategy: Strategy) -> Plan:
    """Join the regions of each chain to one actor (a pass)."""
    regions = tuple(read_regions(plan))
    return set_regions(plan, join_regions(plan.graph, regions, strategy.micro_batches))


def join_regions(
    graph: LogicalGraph, regions: Sequence[Region], micro_batches: int
) -> tuple[Region, ...]:
    """Join the regions (in topological order) of each chain of a boxed graph; return those that
    remain.

    A chain takes the place of its first region; its regions' ops follow one another.
    """
    merging = _Merging(graph, regions, micro_batches)
    merged: set[int] = set()
    out = []
    for first, region in enumerate(regions):
        if first not in merged:
            chain = merging.chain(first, merged)
            merged.update(chain)
            units = dict.fromkeys((region.unit, regions[chain[-1]].unit))
            ops = tuple(op for k in chain for op in regions[k].ops)
            out.append(replace(region, unit="..".join(units), ops=ops))
    return tuple(out)


class _Merging:
    """The order of regions while they are joined: sets of numbers, as bits of integers."""

    def __init__(self, graph: LogicalGraph, regions: Sequence[Region], micro_batches: int) -> None:
        self.regions = regions
        self.before, moving = _find_inputs(graph, regions)
        self.readers: dict[int, set[int]] = {k: set() for k in self.before}
        for k, read in self.before.items():
            for other in read:
                self.readers[other].add(k)
        self.ancestors = find_ancestors(self.before)
        waiting = find_ancestors(self.readers)
        self.boxings = {k: others & moving for k, others in waiting.items()}  # that wait for one
        self.leaving = {v.new for v in graph.variables if v.new} | {t for _, t in graph.results}
        programs = [_program(graph, region) for region in regions]
        times = Counter(programs)
        self.equal = {k for k, program in enumerate(programs) if times[program] > 1}
        self.waiting = _stages_that_wait(graph)
        self.may_wait = (WEIGHT_GRAD,) if micro_batches == 1 else (FORWARD, BACKWARD, WEIGHT_GRAD)

    def chain(self, first: int, merged: Collection[int]) -> list[int]:
        """Follow a chain from its first region on, without regions that are merged already."""
        chain = [first]
        while (following := self._follows(chain)) is not None and following not in merged:
            chain.append(following)
        return chain

    def _follows(self, chain: Sequence[int]) -> int | None:
        """Find the region that joins the end of a chain; None: it ends here."""
        stage, phase = self.regions[chain[0]].key[:2]
        if chain[0] in self.equal or (stage in self.waiting and PHASES[phase] in self.may_wait):
            return None
        if self.leaving.intersection(
            name for op in self.regions[chain[-1]].ops for name in op.makes
        ):
            return None
        there = self.ancestors[chain[0]] | _bits(chain)
        waiting = self.boxings[chain[-1]]
        readers = {k for member in chain for k in self.readers[member] if k < len(self.regions)}
        for k in sorted(readers.difference(chain)):
            same = self.regions[k].key[:2] == (stage, phase) and k not in self.equal
            if same and _bits(self.before[k]) & ~there == 0 == waiting & ~self.boxings[k]:
                return k
        return None


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _find_inputs(graph: LogicalGraph, regions: Sequence[Region]) -> tuple[dict[int, set[int]], int]:
    """Return for each region, moving op and batch of a stage, all numbered, those whose tensors it
    reads; and a bit for each moving op.
    """
    inside = {op.name: k for k, region in enumerate(regions) for op in region.ops}
    numbers = defaultdict(count(len(regions)).__next__, inside)
    there = _tensors_of_weights(graph)
    maker = {f.tensor: numbers[f"batch@{f.stage}"] for f in graph.feeds if not f.per_step}
    for op in graph.ops:
        maker.update((name, numbers[op.name]) for name in op.makes if name not in there)
    before: dict[int, set[int]] = {k: set() for k in numbers.values()}
    for op in graph.ops:
        read = {maker[name] for name in op.inputs if name in maker}
        before.setdefault(numbers[op.name], set()).update(read - {numbers[op.name]})
    return before, _bits(numbers[op.name] for op in graph.ops if is_communication(op))


def _program(graph: LogicalGraph, region: Region) -> tuple[object, ...]:
    return (
        region.key[:2],
        *((op.target, *(graph.tensors[name].shape for name in op.makes)) for op in region.ops),
    )


def _tensors_of_weights(graph: LogicalGraph) -> frozenset[str]:
    """Tensors that a rank makes of its own weights alone, once a step; and counts of the step."""
    there = set(graph.variable_of) | {f.tensor for f in graph.feeds if f.per_step}
    for op in graph.ops:
        if op.phase == WEIGHTS and not is_communication(op) and there.issuperset(op.inputs):
            there.update(op.makes)
    return tensors_of_counts(graph) | there


def _stages_that_wait(graph: LogicalGraph) -> frozenset[int]:
    """Stages that wait for others in a micro-batch: others of its acts go between."""
    stages: set[int] = set()
    for op in graph.ops:
        if is_communication(op) and not op.per_step:
            stages |= {op.stage, op.args[1]} if op.target == TRANSFER else {op.stage}
    return frozenset(stages)
