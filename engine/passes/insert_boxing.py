"""insert_boxing: signed -> boxed.  Boxing ops are inserted where a reader needs another layout.

A layout is (stage, nd-SBP).  One boxing serves all its readers.  A step on one axis is an op
`flow.box` (args: tensor, BoxingStep); a crossing from one stage to another is `flow.transfer`
(args: tensor, source stage).  Steps that move nothing (slice, pad, keep) are ordinary ops of the
reader's region.  Tensors that live for a step are boxed once a step: accumulated gradients in phase
update, weights (and tensors that hoist_weights makes of them) in phase weights.  Under ZeRO 3
forward and backward each gather a weight with every micro-batch, and it crosses to another stage
sharded, once a step; what is made of shards to be gathered is made with each gather, but what is
smaller than they are (a scale) is gathered once a step.  Keys and values that ranks gather along
the length are gathered again for backward, so that a rank holds its share of them.  A single number
goes from stage to stage: else each would have messages, and a group of ranks
(actors/communicators.py), with each other one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flowrun.engine.boxing.boxing import SWAP, BoxingStep, path, path_seconds, replace_axis
from flowrun.engine.boxing.crossing import transfer_sbps
from flowrun.engine.ir.graph import (
    BACKWARD,
    COUNT,
    FORWARD,
    UPDATE,
    WEIGHT_GRAD,
    WEIGHTS,
    LogicalGraph,
    Op,
    Ref,
    rename_inputs,
    replace_inputs,
)
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.sbp import B, NdSbp, S, format_nd_sbp
from flowrun.engine.ops import registry
from flowrun.engine.ops.experts.routed import note_idle_room
from flowrun.engine.ops.flow.structure import BOX, TRANSFER
from flowrun.engine.ops.nn.attention import balance, gathered_keys
from flowrun.engine.ops.nn.ring_attention import SWAP_HALVES, TURN
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy


def insert_boxing(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Insert boxing ops between every op and its readers, and after the results (reported
    whole).
    """
    boxer = _Boxer(graph, strategy)
    for op in graph.ops:
        for part in boxer.expand(op):
            boxer.add(part)
    results = []
    for name, tensor in graph.results:
        stage = graph.producer[tensor].stage
        whole = Location(stage, (B,) * len(strategy.axes))
        results.append((name, boxer.box(tensor, whole, Op("", "", (), phase=UPDATE))))
    ops = _advance_to_first_reader(boxer.read_ops())
    graph = replace(graph, notes=(*graph.notes, *note_idle_room(graph.ops)))
    return replace(graph, ops=ops, tensors=boxer.tensors, results=tuple(results))


def _advance_to_first_reader(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Move boxings made for weight gradients, which may run late, to backward if backward reads
    them too.
    """
    out: list[Op] = []
    backward_reads: set[str] = set()
    for op in reversed(ops):
        late = op.phase == WEIGHT_GRAD and op.target in (BOX, TRANSFER)
        if late and backward_reads.intersection(op.makes):
            op = replace(op, phase=BACKWARD)
        if op.phase == BACKWARD:
            backward_reads.update(op.inputs)
        out.append(op)
    return tuple(reversed(out))


def _box_of_turn(op: Op) -> Op:
    """Return the boxing of an op that moves pieces, or halves of them, among the ranks of an axis;
    other ops stay.
    """
    if op.target not in (TURN, SWAP_HALVES):
        return op
    value, dim, _, _, axis, _ = op.args
    (name,) = op.makes  # boxings are known by what they make
    step = BoxingStep(axis, S(dim), S(dim), swapped=op.target == SWAP_HALVES)
    return replace(op, name=name, target=BOX, args=(value, step))


class _Boxer:
    """The ops so far, and the forms in which every tensor exists."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.strategy = strategy
        self.tensors = dict(graph.tensors)
        # these live for a step; a buffer that changes with every micro-batch is boxed as often
        self.weights: set[str] = set(graph.variable_of) - graph.running
        self.written = {v.tensor: v.new for v in graph.variables if v.new is not None}
        self.ops: list[Op] = []
        self.swapped: dict[tuple[str, tuple[object, ...]], str] = {}
        self.consumers = graph.consumers
        self.gathered_keys: set[str] = set()
        self.made_of_shards: dict[str, Op] = {}  # tensor -> the op of phase weights, at home
        self.reduced: set[str] = set()  # smaller than the weights of which they are made: scales
        # original tensor -> (location, scope) -> name; scope: the phase that may read it,
        # or "" for all
        self.forms: dict[str, dict[tuple[Location, str], str]] = {}
        self.per_step: set[str] = set(self.weights)
        for source in graph.sources:
            self.forms[source.tensor] = {(Location(source.stage, source.nd_sbp), ""): source.tensor}

    def expand(self, op: Op) -> Iterator[Op]:
        """Yield the op, or the ordinary ops that its signature stands for (split softmax).

        Halves that were swapped are not swapped again, nor back: backward reads what forward has
        made.  But the output, which others read in the order of tokens, is stored in that order
        alone, and swapped again.
        """
        self.gathered_keys |= gathered_keys(op)
        op = balance(op) if self.strategy.balances else op
        if not registry.needs_expansion(op, self.tensors):
            yield op
            return
        grid = self.strategy.placements[op.stage].shape
        ops, tensors = registry.expand(op, self.tensors, grid)
        self.tensors.update({tensor.name: tensor for tensor in tensors})
        known: dict[str, str] = {}
        for part in ops:
            if part.target == SWAP_HALVES:
                (read,), (made,), how = part.inputs, part.makes, part.args[1:]
                if (read, how) in self.swapped:
                    known[made] = self.swapped[read, how]
                    del self.tensors[made]
                    continue
                self.swapped[read, how] = made
                if len(self.consumers.get(made, ())) == 1:
                    self.swapped[made, how] = read
            yield _box_of_turn(rename_inputs(part, known))

    def add(self, op: Op) -> None:
        """Append an op, with its inputs boxed to what its signature reads."""
        read = [
            self.box(name, Location(op.stage, nd_sbp), op)
            for name, nd_sbp in zip(op.inputs, op.in_sbp, strict=True)
        ]
        for given, boxed in zip(op.inputs, read, strict=True):
            written = self.written.get(given) in op.makes
            assert boxed == given or not written, f"{op.name} would write a copy of {given}"
        self.ops.append(replace_inputs(op, read))
        for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=True):
            if name is not None:
                self.forms[name] = {(Location(op.stage, nd_sbp), ""): name}
                if op.phase == UPDATE or has(op.target, Trait.SUM):
                    self.per_step.add(name)
                if op.phase == WEIGHTS:
                    self._add_of_weights(name, op, self.weights.issuperset(read))

    def _add_of_weights(self, name: str, op: Op, of_shards: bool) -> None:
        """Record a tensor of phase weights.  of_shards: its op reads what is at home alone."""
        self.weights.add(name)
        num_elements = self.tensors[name].num_elements
        whole = (given for given in op.inputs if given not in self.reduced)
        if all(self.tensors[given].num_elements > num_elements for given in whole):
            self.reduced.add(name)
        elif of_shards and len(op.makes) == 1:
            self.made_of_shards[name] = op

    def box(self, name: str, wanted: Location, reader: Op) -> str:
        """Return the name of the tensor in the wanted layout; append the boxing if need be."""
        phase = reader.phase
        forms = self.forms[name]
        stages = [place.stage for place, scope in forms if scope in ("", _scope(phase))]
        nearest = min(stages, key=lambda stage: abs(stage - wanted.stage))
        if abs(nearest - wanted.stage) > 1 and math.prod(self.tensors[name].shape) == 1:
            toward = 1 if nearest < wanted.stage else -1
            self.box(name, wanted._replace(stage=wanted.stage - toward), reader)
        for scope in ("", _scope(phase)):
            if (wanted, scope) in forms:
                return forms[wanted, scope]
        ways = {
            place: (form, list(self._steps(name, place, wanted)))
            for (place, scope), form in forms.items()
            if scope in ("", _scope(phase))
        }
        # steps that run once a step must start from a form that exists once a step
        start = min(
            (p for p in ways if (p, "") in forms or not self._once_a_step(name, ways[p][1], phase)),
            key=lambda place: self._seconds(name, place, wanted),
        )
        form, steps = ways[start]
        once = self._once_a_step(name, steps, phase)
        late = 0 == once < self._once_a_step(name, steps, WEIGHTS)
        form = self._make_again(form, start, _scope(phase)) if late else form
        for k, (step, place) in enumerate(steps):
            form = self._append(name, form, step, place, reader, k < once)
        return form

    def _make_again(self, name: str, place: Location, scope: str) -> str:
        """Return what is gathered: a tensor of shards is made for it by ops of its own, from the
        weight's shard on.
        """
        if name not in self.made_of_shards:
            return name
        op, new = self.made_of_shards[name], f"{name}/{scope}"
        if (place, scope) not in self.forms[name]:
            read = [
                self._make_again(given, Location(op.stage, nd_sbp), scope)
                for given, nd_sbp in zip(op.inputs, op.in_sbp, strict=True)
            ]
            self.tensors[new] = replace(self.tensors[name], name=new)
            again = replace(op, name=new, outputs=(new,), phase=scope)
            self.ops.append(replace_inputs(again, read))
            self.forms[name][place, scope] = new
        return new

    def read_ops(self) -> list[Op]:
        """Return the ops without those that were made again for all their readers, or brought back
        to the order of tokens for none.
        """
        out: list[Op] = []
        read: set[str] = set()
        for op in reversed(self.ops):
            left_out = op.target == BOX and op.args[1].kind == SWAP
            left_out |= not self.made_of_shards.keys().isdisjoint(op.makes)
            if not (left_out and read.isdisjoint(op.makes)):
                read.update(op.inputs)
                out.append(op)
        return out[::-1]

    def _once_a_step(
        self, name: str, steps: list[tuple[BoxingStep | None, Location]], phase: str
    ) -> int:
        """Return how many of the first steps of a weight's path run once a step.

        They end with the last step that moves bytes; under ZeRO 3 with the crossing, after which
        the other stage gathers.
        """
        if name not in self.weights:
            return 0
        late = phase != WEIGHTS and name not in self.reduced
        gathers_late = self.strategy.zero.stage == 3 and late
        return max(
            (
                k + 1
                for k, (step, _) in enumerate(steps)
                if step is None or (step.moves and not gathers_late)
            ),
            default=0,
        )

    def _seconds(self, name: str, have: Location, wanted: Location) -> float:
        tensor = self.tensors[name]
        hardware, placements = self.strategy.hardware, self.strategy.placements
        if have.stage != wanted.stage:
            link = hardware.crossing(placements[have.stage], placements[wanted.stage])
            hops = abs(have.stage - wanted.stage) if math.prod(tensor.shape) == 1 else 1
            return 1e3 * hops + tensor.num_bytes / link.bytes_per_s * (
                1 + (format_nd_sbp(have.nd_sbp) != format_nd_sbp(wanted.nd_sbp))
            )
        grid, links = placements[have.stage].shape, hardware.links(placements[have.stage])
        return path_seconds(have.nd_sbp, wanted.nd_sbp, grid, tensor.shape, tensor.num_bytes, links)

    def _steps(
        self, name: str, have: Location, wanted: Location
    ) -> Iterator[tuple[BoxingStep | None, Location]]:
        """Yield each step with the layout that it leads to; None is the crossing between stages."""
        shape = self.tensors[name].shape
        (stage, nd_sbp), (target_stage, target) = have, wanted
        here, there = (self.strategy.placements[k] for k in (stage, target_stage))
        if stage != target_stage:
            far = self.strategy.hardware.is_far(here, there)
            sent, received = transfer_sbps(here, nd_sbp, there, target, shape, far)
            yield from _path_places(stage, nd_sbp, sent, here.shape, shape)
            yield None, Location(target_stage, received)
            nd_sbp = received
        yield from _path_places(target_stage, nd_sbp, target, there.shape, shape)

    def _append(
        self,
        name: str,
        output: str,
        step: BoxingStep | None,
        place: Location,
        reader: Op,
        hoisted: bool,
    ) -> str:
        scope, op_phase = self._period(name, hoisted, reader.phase)
        if name in self.gathered_keys and step and (step.source, step.target) == (S(2), B):
            scope = _scope(reader.phase)
        forms = self.forms[name]
        if (place, scope) in forms:
            return forms[place, scope]
        stage, nd_sbp = place
        new = f"{name}:{format_nd_sbp(nd_sbp) if nd_sbp else 'whole'}" + (
            f"@{stage}" if step is None else ""
        )
        new += f"/{scope}" if scope else ""
        while new in self.tensors:
            new += "'"
        before = next(p for (p, _), n in forms.items() if n == output)
        self.tensors[new] = replace(self.tensors[name], name=new)
        target, argument = (TRANSFER, before.stage) if step is None else (BOX, step)
        self.ops.append(
            Op(
                new,
                target,
                (Ref(output), argument),
                (),
                outputs=(new,),
                module=reader.module,
                phase=op_phase,
                stage=stage,
                in_sbp=(before.nd_sbp,),
                out_sbp=(nd_sbp,),
                chunk=reader.chunk,
            )
        )
        forms[place, scope] = new
        if name in self.per_step and op_phase == UPDATE:
            self.per_step.add(new)
        return new

    def _period(self, name: str, hoisted: bool, phase: str) -> tuple[str, str]:
        """Return (scope, phase) of a boxing step of a tensor for a reader in `phase`.

        hoisted: a step of a weight's path that runs once a step.
        """
        if name in self.weights:
            return ("", WEIGHTS) if hoisted else (_scope(phase), _scope(phase))
        if name in self.per_step:
            return "", WEIGHTS if phase == WEIGHTS else UPDATE
        return (COUNT, COUNT) if phase == COUNT else ("", phase)


def _scope(phase: str) -> str:
    """Return the phase that stands for those that share a form: backward and weight_grad share."""
    return phase if phase in (COUNT, WEIGHTS, FORWARD, UPDATE) else BACKWARD


def _path_places(
    stage: int, source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[BoxingStep, Location]]:
    nd_sbp = source
    for step in path(source, target, grid, shape):
        nd_sbp = replace_axis(nd_sbp, step.axis, step.target)
        yield step, Location(stage, nd_sbp)
