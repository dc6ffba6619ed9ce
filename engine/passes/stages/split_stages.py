"""split_stages: captured -> staged.  Gives every op of forward and backward the stage (group of
ranks) that runs it.

Forward ops form a line.  It is cut into `placement.chunks` times as many pieces as there are
stages; the schedule says which stage owns a piece, as its chunks 0, 1, …: those that are k modulo
the number of stages belong to stage k, or, in a V, the second half goes back up.  Either the
piece of each op is given (chosen_stages.py), or the line is cut by foreseen time
(balance_stages.py); a cut may fall inside a module.  A backward op follows its forward op.  A sum
of gradients goes to the earliest piece of its addends (the gradient travels towards the first piece
once, summed).  Ops that no activation enters (masks, rotary tables, views and casts of weights) are
no part of the line: each piece that reads one computes its own.  A parameter lives where it is
first used; a batch field enters at every stage that reads it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from flowrun.engine.actors.schedules import Schedule, schedule_of
from flowrun.engine.hardware.network import worst
from flowrun.engine.ir.graph import BACKWARD, FORWARD, Feed, LogicalGraph, Op, rename_inputs
from flowrun.engine.passes.layout.apply_pins import apply_pins
from flowrun.engine.passes.stages.balance_stages import ForwardSequence, balance_cuts, make_line
from flowrun.engine.passes.stages.chosen_stages import (
    pieces_from_stages,
    stages_from_graph,
    stages_from_list,
)
from flowrun.engine.passes.stages.stage_costs import one_stage, weigh_line
from flowrun.engine.strategy import Strategy

OpPieces = dict[str, tuple[int, ...]]  # op -> the pieces of the line that run it, in order


def split_stages(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Set the stage of every op, variable and feed.

    Raises RecipeError if `placement.stages` does not fit the model.
    """
    if strategy.num_stages > 1:
        schedule = schedule_of(strategy)
        line, free = _line(graph)
        if strategy.decided:
            pieces = stages_from_graph(line, strategy.decided, schedule.last_stage)
        elif strategy.stage_modules:
            pieces = stages_from_list(graph, line, strategy.stage_modules, schedule.last_stage)
            if strategy.chunks > 1:
                pieces = pieces_from_stages(pieces, schedule)
        else:
            pieces = _balance_line(graph, line, free, strategy)
        homes = dict(strategy.decided.variables) if strategy.decided else {}
        graph = _write_stages(graph, _place_ops(graph, line, free, pieces, homes), schedule)
    return _place_sources(graph, strategy)


def line_to_cut(graph: LogicalGraph, strategy: Strategy) -> tuple[tuple[Op, ...], ForwardSequence]:
    """Return (the first op of each piece, the line) of a captured graph, as the stages divide
    it.
    """
    graph = apply_pins(graph, strategy)
    line, free = _line(graph)
    starts, weighed = _weigh_line(graph, line, free, strategy)
    return tuple(line[start] for start in starts), weighed


def _balance_line(
    graph: LogicalGraph, line: Sequence[Op], free: frozenset[str], strategy: Strategy
) -> list[int]:
    """Return the piece of each op of the line, cut by foreseen time."""
    starts, weighed = _weigh_line(graph, line, free, strategy)
    schedule = schedule_of(strategy)
    stages = map(schedule.stage_of, range(strategy.num_stages * strategy.chunks))
    ranks = [len(strategy.placements[stage].ranks) for stage in stages]
    cuts = [starts[cut] for cut in balance_cuts(weighed, ranks, strategy.chunks)]
    return [bisect_right(cuts, k) for k in range(len(line))]


def _weigh_line(
    graph: LogicalGraph, line: Sequence[Op], free: frozenset[str], strategy: Strategy
) -> tuple[list[int], ForwardSequence]:
    """Return (the index of the op with which each piece begins, the line with its costs)."""
    around = strategy.chunks > 1 and not schedule_of(strategy).turns_back
    again = strategy.placements[:1] if around else ()
    pairs = itertools.pairwise((*strategy.placements, *again))
    link = worst(strategy.hardware.crossing(*pair) for pair in pairs)
    places = {name: at[0] for name, at in _place_ops(graph, line, free, range(len(line))).items()}
    alone = one_stage(strategy)
    staged = _place_sources(graph, alone)
    ranks = len(alone.placements[0].ranks)  # seconds below are sums over these
    seconds = [ranks * each for each in weigh_line(staged, places, len(line), alone)]
    return make_line(graph, line, seconds, link, ranks * strategy.hardware.act_s)


# ---- which ops go where --------------------------------------------------------------------------


def _line(graph: LogicalGraph) -> tuple[list[Op], frozenset[str]]:
    """Return (the forward ops that stages divide, in order; names of all free ops)."""
    free = _free(graph)
    return [op for op in graph.ops if op.phase == FORWARD and op.name not in free], free


def _free(graph: LogicalGraph) -> frozenset[str]:
    """Return ops that no activation enters.

    They are made of weights alone, or of the batch, constants and draws alone.
    """
    sources_of: dict[str, frozenset[str]] = {
        feed.tensor: frozenset(("batch",)) for feed in graph.feeds
    }
    for v in graph.variables:
        sources_of[v.tensor] = frozenset(("weight",)) if v.kind == "parameter" else frozenset()
    free: set[str] = set()
    for op in graph.ops:
        sources = frozenset().union(*(sources_of[name] for name in op.inputs))
        if len(sources) < 2:
            free.add(op.name)
        sources_of.update(dict.fromkeys(op.makes, sources))
    return frozenset(free)


def _place_ops(
    graph: LogicalGraph,
    line: Sequence[Op],
    free: frozenset[str],
    pieces: Sequence[int],
    homes: Mapping[str, int] = MappingProxyType({}),
) -> OpPieces:
    """Return the pieces that run each op, given the piece of each op of the line.  homes: of
    variables whose stage another graph has chosen.
    """
    places: OpPieces = {op.name: (piece,) for op, piece in zip(line, pieces, strict=True)}
    last = max(pieces)
    forward = [op for op in graph.ops if op.phase == FORWARD]
    _place_at_readers(graph, [op for op in forward if op.name in free], places, None)
    followed = _BackwardPieces(forward, places, last)
    piece_of: dict[str, int] = {}  # tensor -> piece
    for op in graph.ops:
        if op.phase == BACKWARD and op.name not in free:
            places[op.name] = (
                followed.piece(op, [piece_of[n] for n in op.inputs if n in piece_of]),
            )
        piece_of.update(dict.fromkeys(op.makes, places.get(op.name, (last,))[0]))
    _place_at_readers(graph, [op for op in graph.ops if op.name in free], places, last)
    return {**places, **_place_buffer_ops(graph, places, homes)}


def _place_buffer_ops(graph: LogicalGraph, places: OpPieces, homes: Mapping[str, int]) -> OpPieces:
    """Return the piece of each op that copies or writes a buffer that forward changes.

    It is the first piece that reads the buffer, unless another graph has its home.
    """
    placed: OpPieces = {}
    for v in (v for v in graph.variables if v.tensor in graph.running):
        ops = graph.consumers[v.tensor]
        piece = homes.get(v.name, min(places[ops[0].name]))
        placed.update({op.name: (piece,) for op in ops})
    return placed


def _place_at_readers(
    graph: LogicalGraph, free: Sequence[Op], places: OpPieces, unread: int | None
) -> None:
    """Place free ops in every piece that reads them.  unread: the piece of an op that nobody
    reads.
    """
    for op in reversed(free):
        readers = [r.name for name in op.makes for r in graph.consumers.get(name, ())]
        pieces = sorted({piece for name in readers for piece in places.get(name, ())})
        if pieces:
            places[op.name] = tuple(pieces)
        elif unread is not None:
            places[op.name] = (unread,)


class _BackwardPieces:
    """The piece of each backward op: that of its forward op.

    Torch recorded the moment of both; if an op has no moment, its module decides.
    """

    def __init__(self, forward: Sequence[Op], places: Mapping[str, tuple[int, ...]], last: int):
        placed = [op for op in forward if op.name in places]
        dated = sorted((op for op in placed if op.moment >= 0), key=lambda op: op.moment)
        self.moments = [op.moment for op in dated]
        self.pieces = [places[op.name][0] for op in dated]
        self.of_module = {op.module: places[op.name][0] for op in placed}
        self.last = last

    def piece(self, op: Op, inputs: Sequence[int]) -> int:
        """Return the piece of a backward op.  inputs: the pieces of its inputs."""
        at = bisect_right(self.moments, op.moment)
        if op.moment >= 0 and at:
            return self.pieces[at - 1]
        if op.module and op.module in self.of_module:
            return self.of_module[op.module]
        return min(inputs, default=self.last)


# ---- writing it down -----------------------------------------------------------------------------


def _write_stages(graph: LogicalGraph, places: OpPieces, schedule: Schedule) -> LogicalGraph:
    """Return the graph with the stage and chunk of every op; an op in several pieces becomes
    copies.
    """
    copies: dict[str, dict[int, str]] = {}  # tensor -> piece -> its name there
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        pieces = places[op.name]
        for piece in pieces:
            here = {n: copies[n][piece] for n in op.inputs if piece in copies.get(n, ())}
            stage, chunk = schedule.stage_of(piece), piece // schedule.stages
            placed = replace(rename_inputs(op, here), stage=stage, chunk=chunk)
            if len(pieces) > 1:
                names = {n: f"{n}@{piece}" for n in op.makes}
                tensors.update({new: replace(tensors[n], name=new) for n, new in names.items()})
                for n, new in names.items():
                    copies.setdefault(n, {})[piece] = new
                outputs = tuple(n and names[n] for n in op.outputs)
                placed = replace(placed, name=f"{op.name}@{piece}", outputs=outputs)
            ops.append(placed)
    results = tuple(
        (name, min(copies[t].items())[1] if t in copies else t) for name, t in graph.results
    )
    return replace(graph, ops=tuple(ops), tensors=tensors, results=results)


def _place_sources(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Make one feed for each stage that reads a field, and set the home stage of every variable."""
    readers: dict[str, list[int]] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op.stage)
    feeds: list[Feed] = []
    tensors = dict(graph.tensors)
    names: dict[tuple[str, int], str] = {}
    for feed in graph.feeds:
        for stage in sorted(set(readers.get(feed.tensor, ()))):
            name = feed.tensor if strategy.num_stages == 1 else f"{feed.tensor}@{stage}"
            names[feed.tensor, stage] = name
            tensors[name] = replace(tensors[feed.tensor], name=name)
            feeds.append(replace(feed, tensor=name, stage=stage))
    ops = tuple(
        rename_inputs(op, {n: names[n, op.stage] for n in op.inputs if (n, op.stage) in names})
        for op in graph.ops
    )
    homes = dict(strategy.decided.variables) if strategy.decided else {}
    variables = tuple(
        replace(v, stage=homes.get(v.name, readers[v.tensor][0]))
        for v in graph.variables
        if v.tensor in readers
    )
    return replace(graph, ops=ops, tensors=tensors, feeds=tuple(feeds), variables=variables)
