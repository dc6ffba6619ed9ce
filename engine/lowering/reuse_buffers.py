"""reuse_buffers: which op of a region may write its result over one that it reads, since nobody
reads that any more: no new memory, and a third of the bytes less to move.

Seldom worth its time, always worth its memory: logits and the gradients of a loss are among the
largest tensors of a step.  What an op makes is memory of its own only if it ALLOCATES
(ir/op_info.py).  All else counts as another name of what it reads, to which nothing is written
unless the op ALIASES it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.ir.graph import Op, Ref
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.registry import info
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy


def reuse_buffers(plan: Plan, strategy: Strategy) -> Plan:
    """Write results over what nobody reads any more, if the strategy asks for it (a pass)."""
    return overwrite(plan) if strategy.overwrites else plan


def overwrite(plan: Plan) -> Plan:
    """Fill `overwrites` of every region."""
    before, actors = _actors_before(plan), list[Actor]()
    names = [_Names(plan, stage) for stage in range(len(plan.placements))]
    for actor in plan.actors:
        if isinstance(work := actor.work, RegionWork):
            pairs = tuple(_of_region(plan, actor, work, names[actor.stage], before[actor.id]))
            actor = replace(actor, work=replace(work, overwrites=pairs))
        actors.append(actor)
    return replace(plan, actors=tuple(actors))


def _actors_before(plan: Plan) -> Mapping[int, int]:
    """Actor -> a bit for each that has ended its act of a micro-batch before the actor begins its
    own, whatever the timing: what it makes is read on the way there.
    """
    makers: dict[int, set[int]] = {actor.id: set() for actor in plan.actors}
    for r in plan.registers:
        if r.producer is None or r.initial:
            continue
        if not any(plan.actors[k].per_step for k in (r.producer, *r.readers)):  # of a micro-batch
            for reader in r.readers:
                makers[reader].add(r.producer)
    return find_ancestors(makers)


def find_ancestors(makers: Mapping[int, Collection[int]]) -> Mapping[int, int]:
    """Number -> a bit for each of those before it on any way.  makers: those right before it."""
    ancestors: dict[int, int] = {}
    for number in TopologicalSorter(makers).static_order():
        ancestors[number] = 0
        for maker in makers[number]:
            ancestors[number] |= ancestors[maker] | 1 << maker
    return ancestors


class _Names:
    """Tensors of a stage that may be one memory."""

    def __init__(self, plan: Plan, stage: int) -> None:
        self._first: dict[str, str] = {}
        fixed = [v.tensor for v in plan.graph.variables] + [f.tensor for f in plan.graph.feeds]
        here = (op for op in plan.graph.ops if op.stage == stage)
        for op in (op for op in here if not has(op.target, Trait.ALLOCATES)):
            names = (*op.inputs, *op.makes)
            for name in names[1:]:
                self._first[self.memory(name)] = self.memory(names[0])
            fixed += names if not has(op.target, Trait.ALIASES) else ()
        self.fixed = {self.memory(name) for name in fixed}  # nothing is written there
        self.readers: dict[str, set[int]] = {}  # memory -> actors, by the registers that hold it
        self.lasting: set[str] = set()  # its registers outlive an act of their reader
        self._add_registers(plan, stage)

    def _add_registers(self, plan: Plan, stage: int) -> None:
        for r in (r for r in plan.registers if r.stage == stage):
            for memory in map(self.memory, r.tensors):
                self.readers.setdefault(memory, set()).update(r.readers)
                if r.initial or any(plan.actors[k].per_step != r.per_step for k in r.readers):
                    self.lasting.add(memory)

    def is_free(self, memory: str, actor: Actor, done: int) -> bool:
        """Return whether no other actor reads a memory once those of `done` have ended."""
        others = self.readers.get(memory, set()) - {actor.id}
        unread = all(done >> k & 1 for k in others)
        return unread and memory not in self.lasting and memory not in self.fixed

    def memory(self, name: str) -> str:
        while (first := self._first.get(name, name)) != name:
            self._first[name] = name = self._first.get(first, first)
        return name


def _of_region(
    plan: Plan, actor: Actor, work: RegionWork, names: _Names, done: int
) -> Iterable[tuple[str, str]]:
    """(made, what it is written over).  done: a bit for each actor that reads nothing any more."""
    kept = {names.memory(n) for n in (*work.makes, *(new for _, new in work.updates))}
    last = {names.memory(n): k for k, op in enumerate(work.ops) for n in op.inputs}
    for k, op in enumerate(work.ops):
        reads = Counter(map(names.memory, _tensors(op)))
        variant = info(op.target).out
        for argument in variant.over if variant else ():
            ref = op.args[argument]
            if not isinstance(ref, Ref) or not _match_in_layout(plan, op, ref.name):
                continue
            memory = names.memory(ref.name)
            unread = last[memory] == k and reads[memory] == 1 and memory not in kept
            if unread and names.is_free(memory, actor, done):
                yield op.makes[0], ref.name
                break


def _tensors(op: Op) -> Iterable[str]:
    return (arg.name for arg in (*op.args, *(v for _, v in op.kwargs)) if isinstance(arg, Ref))


def _match_in_layout(plan: Plan, op: Op, name: str) -> bool:
    read, written = plan.graph.tensors[name], plan.graph.tensors[op.makes[0]]
    layouts = {op.in_sbp[k] for k, other in enumerate(op.inputs) if other == name}
    same = (read.shape, read.dtype) == (written.shape, written.dtype)
    return same and len(op.makes) == 1 and layouts == {op.out_sbp[0]}
