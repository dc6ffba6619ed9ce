"""add_registers: what passes between actors, and how many slots each register has.

Tensors that one actor makes for the same readers share a register.  Slots: 1 for what changes once
a step; the stage's micro-batches in flight for a stash; engine.register_slots for the rest, but at
least 2 for a reader's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flowrun.engine.actors.plan import (
    BOX,
    READER,
    REGION,
    Actor,
    BoxWork,
    CopyWork,
    Plan,
    RegionWork,
    Register,
)
from flowrun.engine.boxing.boxing import ALL_GATHER, SWAP, TURN
from flowrun.engine.ir.graph import BACKWARD, COUNT, FORWARD, PHASES, UPDATE, WEIGHT_GRAD
from flowrun.engine.strategy import Strategy

_TURNS_AHEAD = 2  # one block is computed, the next one comes


def add_registers(plan: Plan, strategy: Strategy) -> Plan:
    """Add the registers between actors (a pass).  Raises RecipeError for an unknown schedule."""
    return _Connector(plan, strategy).connect()


@dataclass(frozen=True)
class _Connector:
    plan: Plan
    strategy: Strategy

    def connect(self) -> Plan:
        """Make all registers, and give each actor those that it reads and fills."""
        readers = self.readers
        groups: dict[tuple[int | None, bool, tuple[int, ...]], list[str]] = {}
        for name in (*(v.tensor for v in self.plan.graph.variables), *self.maker):
            if name in readers:
                producer = self._producer(name)
                actor = None if producer is None else self.actors[producer]
                per_step = actor is None or actor.per_step or name in actor.sums
                groups.setdefault((producer, per_step, tuple(readers[name])), []).append(name)
        registers = [
            self._register(k, producer, per_step, read_by, tuple(names))
            for k, ((producer, per_step, read_by), names) in enumerate(groups.items())
        ]
        for before, waiting in self.throttle.pairs(self.strategy.register_slots):
            empty = Register(
                id=len(registers),
                name=f"after {self.actors[before].name}",
                stage=self.actors[before].stage,
                tensors=(),
                producer=before,
                readers=(waiting,),
                slots=1,
                per_step=self.throttle.waits_for_steps(before, waiting),
            )
            registers.append(empty)
        inputs: list[list[int]] = [[] for _ in self.actors]
        outputs: list[list[int]] = [[] for _ in self.actors]
        for register in registers:
            for reader in register.readers:
                inputs[reader].append(register.id)
            if register.producer is not None:
                outputs[register.producer].append(register.id)
        actors = (
            replace(actor, inputs=tuple(inputs[actor.id]), outputs=tuple(outputs[actor.id]))
            for actor in self.actors
        )
        return replace(self.plan, actors=tuple(actors), registers=tuple(registers))

    @property
    def actors(self) -> tuple[Actor, ...]:
        return self.plan.actors

    @cached_property
    def maker(self) -> Mapping[str, int]:
        return {name: actor.id for actor in self.actors for name in actor.makes}

    @cached_property
    def readers(self) -> Mapping[str, list[int]]:
        readers: dict[str, list[int]] = {}
        new_of = {v.tensor: v.new for v in self.plan.graph.variables if v.new}
        for k, actor in enumerate(self.actors):
            for name in actor.reads:
                if name in new_of and self.maker[new_of[name] or ""] == k:
                    continue  # the update reads its own weight in place: it has the credit
                readers.setdefault(name, []).append(k)
        return readers

    @cached_property
    def throttle(self) -> Throttle:
        return Throttle(self.actors, self.maker, self.readers, self.plan.graph.variable_of)

    def _producer(self, name: str) -> int | None:
        variable = self.plan.graph.variable_of.get(name)
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
        stage = self.actors[readers[0]].stage
        variable = names[0] in self.plan.graph.variable_of
        chunk, passes_on = self._chunks(producer, readers)
        waits = passes_on or self._is_stash(producer, readers)
        stash = not variable and not per_step and waits
        slots = self._in_flight(stage, chunk) if stash else self.strategy.register_slots
        gathered = producer is not None and self.throttle.gathers(producer)
        if per_step or variable or gathered:
            slots = 1
        if producer is not None and self.actors[producer].kind == READER:
            slots = max(slots, 2)
            if self._is_counted(producer):  # all of a step is read before its first forward
                slots = max(slots, self.strategy.micro_batches + self.strategy.register_slots)
        label = self.actors[producer].name if producer is not None else "constant"
        return Register(
            id=id,
            name=label,
            stage=stage,
            tensors=names,
            producer=producer,
            readers=readers,
            slots=slots,
            per_step=per_step,
            initial=int(variable),
            num_bytes=sum(map(self.plan.tensor_bytes, names)),
            stash=stash,
        )

    def _is_stash(self, producer: int | None, readers: Iterable[int]) -> bool:
        """True if the register waits for backward (or, from backward, for weight_grad)."""
        made_in = PHASES.index(self.actors[producer].phase) if producer is not None else 0
        later = {PHASES.index(self.actors[r].phase) for r in readers}
        return (
            max(later) > made_in
            and made_in < PHASES.index(UPDATE)
            and max(later) <= PHASES.index(WEIGHT_GRAD)
        )

    def _is_counted(self, producer: int) -> bool:
        """True for a reader of fields that are counted over the step."""
        readers = (k for name in self.actors[producer].makes for k in self.readers.get(name, ()))
        return any(self.actors[k].phase == COUNT for k in readers)

    def _chunks(self, producer: int | None, readers: Iterable[int]) -> tuple[int, bool]:
        """Return (the first chunk of a register's ends, whether it waits for another chunk's turn).

        What a reader supplies to its last chunk waits with what it supplies to the first.
        """
        if self.strategy.chunks == 1:
            return 0, False
        numbers = {self._chunk(k) for k in readers}
        if producer is not None and self.actors[producer].kind == READER:
            makes = self.actors[producer].makes
            numbers = {self._chunk(k) for name in makes for k in self.readers.get(name, ())}
        elif producer is not None:
            numbers.add(self._chunk(producer))
        return min(numbers), len(numbers) > 1

    def _chunk(self, k: int) -> int:
        """The chunk of what an actor makes; a message to another stage is of the one it leaves."""
        actor = self.actors[k]
        makers = map(self.plan.graph.producer.get, actor.makes or actor.reads)
        return min((op.chunk for op in makers if op is not None), default=0)

    def _in_flight(self, stage: int, chunk: int) -> int:
        """Slots of a stage's stash: schedules are register counts."""
        alone = self._single_stage_slots() if self.strategy.num_stages == 1 else 1
        return self.plan.schedule.slots(stage, chunk, alone)

    def _single_stage_slots(self) -> int:
        """Hold two micro-batches in flight if backward waits for collectives, else one.

        It does not wait for what is gathered ahead, nor for what it leaves to be summed: ZeRO.
        """
        ahead = self.throttle
        waits = (
            a.kind == BOX and a.phase == BACKWARD and not (ahead.gathers(k) or ahead.reduces(k))
            for k, a in enumerate(self.actors)
        )
        return 2 if any(waits) else 1


@dataclass(frozen=True, slots=True)
class Throttle:
    """What would run far ahead is held back.

    Weights are always there to be cast and gathered (ZeRO 3), and nothing waits for the reduction
    of a gradient (ZeRO 2, 3) but a sum.  The registers between neighbours hold neither: a rank that
    is early would gather every weight, or hold every gradient until the other ranks come.  What
    goes around a ring (attention) would all come before the first of it is read, what backward
    gathers of stored shards would all come in forward, and states on the host would all be on the
    device before the first is updated.  So an empty register goes from one to the other, with a
    distance of `ahead` regions; of rings, of two; of what is gathered again, of one.

    maker, readers: tensor -> the actors that make and read it.  weights: tensors that last.
    """

    actors: Sequence[Actor]
    maker: Mapping[str, int]
    readers: Mapping[str, Sequence[int]]
    weights: Collection[str]

    def pairs(self, ahead: int) -> Iterator[tuple[int, int]]:
        """(what goes first, what waits for it), with every micro-batch, or step."""
        for gathers in self._by_phase(self.begins_gather, self._first_reader):
            order = sorted(gathers)
            for before, region in zip(order, order[ahead:], strict=False):
                yield from ((before, gather) for gather in gathers[region])
        for reductions in self._by_phase(self.reduces, self._source):
            order = sorted(reductions)
            for before, region in zip(order, order[ahead:], strict=False):
                yield from ((reduction, region) for reduction in reductions[before])
        for turns in self._by_phase(self.turns, self._first_reader):
            order = sorted(turns)
            for before, region in zip(order, order[_TURNS_AHEAD:], strict=False):
                yield from ((before, turn) for turn in turns[region])

        yield from self._gathers_of_stored()
        yield from self._copies(ahead)

    def waits_for_steps(self, before: int, waiting: int) -> bool:
        """Return whether both of a pair act once a step."""
        return self.actors[before].per_step and self.actors[waiting].per_step

    def _gathers_of_stored(self) -> Iterator[tuple[int, int]]:
        """Each waits for the reader of the one before; the first, for its reader's gradient."""
        for gathers in self._by_phase(self.gathers_stored, self._first_reader):
            order = sorted(gathers)
            first = self._source_of_gradient(order[0])
            if first is not None:
                yield from ((first, gather) for gather in gathers[order[0]])
            for before, region in itertools.pairwise(order):
                yield from ((before, gather) for gather in gathers[region])

    def _copies(self, ahead: int) -> Iterator[tuple[int, int]]:
        """Copies back to the host, and the later ones to the device that wait for them; those of
        one direction one after another, as they share its link.
        """
        copies = {k: a.work for k, a in enumerate(self.actors) if isinstance(a.work, CopyWork)}
        back = {variable: k for k, work in copies.items() for variable, _ in work.updates}
        there = [k for k in copies if not copies[k].updates]
        there.sort(key=lambda k: (self.actors[k].stage, self._first_reader(k)))
        for _, of_stage in itertools.groupby(there, key=lambda k: self.actors[k].stage):
            order = list(of_stage)
            returns = [max(back[old] for old, _ in copies[k].copies) for k in order]
            yield from zip(returns, order[ahead:], strict=False)
            yield from itertools.pairwise(order)
            yield from itertools.pairwise(dict.fromkeys(returns))

    def turns(self, k: int) -> bool:
        """A boxing of what goes around the ranks of an axis."""
        work = self.actors[k].work
        return isinstance(work, BoxWork) and any(step.kind == TURN for step in work.steps)

    def gathers(self, k: int) -> bool:
        """A boxing of weights, or of what is made of them for it, with every micro-batch; or one of
        `gathers_stored`.
        """
        actor = self.actors[k]
        there = (self._lasts(n) or self.begins_gather(self.maker[n]) for n in actor.reads)
        return self.gathers_stored(k) or (actor.kind == BOX and not actor.per_step and all(there))

    def begins_gather(self, k: int) -> bool:
        """A boxing of weights, or a region that makes of them what boxings alone read."""
        actor, work = self.actors[k], self.actors[k].work
        sent = isinstance(work, RegionWork) and work.sent == actor.makes != () == work.accumulates
        boxed = (sent or actor.kind == BOX) and not actor.per_step
        return boxed and all(map(self._lasts, actor.reads))

    def gathers_stored(self, k: int) -> bool:
        """A boxing of what this stage's forward has made or received, that regions of backward
        alone read.
        """
        actor, work = self.actors[k], self.actors[k].work
        if not isinstance(work, BoxWork) or actor.phase != BACKWARD:
            return False
        made = (not self._lasts(n) and self.actors[self.maker[n]].phase for n in actor.reads)
        readers = [self.actors[r] for name in actor.makes for r in self.readers.get(name, ())]
        again = all(step.kind in (ALL_GATHER, SWAP) for step in work.steps)
        alone = all((r.kind, r.phase) == (REGION, BACKWARD) for r in readers)
        return again and alone and all(phase == FORWARD for phase in made)

    def _source_of_gradient(self, region: int) -> int | None:
        """The last region of backward that made what a region reads; None: it came from another
        stage.
        """
        makers = {self.maker[name] for name in self.actors[region].reads if name in self.maker}
        sources = {self._source(k) for k in makers if not self.gathers_stored(k)}
        regions = [k for k in sources if k is not None and self.actors[k].phase == BACKWARD]
        return max(regions, default=None)

    def _lasts(self, name: str) -> bool:
        """A weight, or the copy of one that another stage gets once a step."""
        return name in self.weights or self.actors[self.maker[name]].per_step

    def reduces(self, k: int) -> bool:
        """A boxing of gradients, with every micro-batch, that sums alone read."""
        actor = self.actors[k]
        readers = [self.actors[r] for name in actor.makes for r in self.readers.get(name, ())]
        sums = all(r.sums and set(r.sums).issuperset(r.makes) for r in readers)
        return actor.kind == BOX and not actor.per_step and sums and self._source(k) is not None

    def _first_reader(self, k: int) -> int:
        """The first region that reads what is boxed, maybe in several steps."""
        readers = [r for name in self.actors[k].makes for r in self.readers.get(name, ())]
        return min(self._first_reader(r) if self.actors[r].kind == BOX else r for r in readers)

    def _source(self, k: int) -> int | None:
        """The last region of those that made what is boxed, maybe in several steps.  None: no
        region did.  It is a weight, such as a convolution's weight gradient reads, or made of
        weights once a step, or comes from another stage, whose send may wait for what this stage
        does later: to hold that back would stop both.
        """
        actor = self.actors[k]
        if actor.kind != BOX:
            return k if actor.kind == REGION and not actor.per_step else None
        makers = {self.maker[name] for name in actor.reads if name in self.maker}
        return max((s for s in map(self._source, makers) if s is not None), default=None)

    def _by_phase(
        self, chosen: Callable[[int], bool], region_of: Callable[[int], int | None]
    ) -> Iterable[dict[int, list[int]]]:
        """Yield, for each stage, phase and chunk: region -> the chosen boxings that belong to it.

        A micro-batch comes to the next chunk after many others were in this one, so that nothing
        of this one may wait for that.
        """
        phases: dict[tuple[int, str, int], dict[int, list[int]]] = {}
        for k, actor in enumerate(self.actors):
            region = region_of(k) if chosen(k) else None
            if region is not None:
                work = self.actors[region].work
                ops = work.ops if isinstance(work, RegionWork) else ()
                chunk = max((op.chunk for op in ops), default=0)
                of_phase = phases.setdefault((actor.stage, actor.phase, chunk), {})
                of_phase.setdefault(region, []).append(k)
        return phases.values()
