"""unfold: a captured graph with few of many equal blocks -> the graph with all of them.

The result is what capture would have made without folding, names included.  autograd treats equal
blocks alike, but this is checked, not assumed: among the blocks that fold.py left, the second and
the third must have the same ops, forward and backward, except for what a step from one block to the
next changes: numbers of blocks, numbers in torch's names, and the neighbour that a tensor comes
from.  Then the second is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flowrun.engine.capture.fold import Fold
from flowrun.engine.capture.parts import Pair, PartOutput, UnlikeError, split_number
from flowrun.engine.capture.patches.alike_blocks import KEPT_BLOCKS
from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    LogicalGraph,
    LogicalTensor,
    Op,
    replace_inputs,
)
from flowrun.engine.ir.module_path import block_of


def unfold(graph: LogicalGraph, fold: Fold) -> LogicalGraph:
    """Return the graph with the blocks that a fold left out; raise UnlikeError if they differ."""
    return _Unfolding(graph, fold).graph()


class _Unfolding:
    """The whole graph of one fold.

    All that follows the repeated part moves `fold.cut` parts further on, including the blocks
    between it and those that were left out.  In all methods `copy` is the number of a copy of the
    repeated part, from 1; 0 stands for the op, path or tensor itself.
    """

    def __init__(self, graph: LogicalGraph, fold: Fold) -> None:
        self.base = graph
        self.fold = fold
        self.pair = Pair(graph, fold)
        self.parts, self.at = self.pair.parts, self.pair.at
        self.tensors: dict[str, LogicalTensor] = {}

    # ------------------------------------------------------------------ names

    def _name(self, op: Op, copy: int) -> str:
        """Return the name of an op: torch numbers ops of one word in the order of their making."""
        word, number = split_number(op.name)
        forward, backward = (self.pair.steps.get((p, word), 0) for p in (FORWARD, BACKWARD))
        cut, moved = self.fold.cut, copy or self.fold.cut * self._is_behind(op)
        if op.phase == FORWARD:
            number += forward * moved
        else:
            number += forward * cut + backward * (cut - copy if copy else moved)
        return f"{word}_{number}" if number else word

    def _is_behind(self, op: Op) -> bool:
        """Return whether the op follows the place where parts of its phase are inserted."""
        phase, part = self.parts.of.get(op.name, (op.phase, -1))
        return part >= 0 and (part > self.at) == (phase == FORWARD)

    def _path(self, path: str, copy: int) -> str:
        """Return the path of a module or a variable."""
        number, fold = block_of(path, self.fold.blocks), self.fold
        if number is None:
            return path
        if number == fold.first + 1:
            more = copy
        else:
            more = fold.cut if fold.first + 1 < number < fold.first + KEPT_BLOCKS else 0
        return f"{fold.blocks}.{number + more}" + path.removeprefix(f"{fold.blocks}.{number}")

    def _tensor(self, name: str, copy: int = 0) -> str:
        """Return the name of a tensor."""
        op = self.base.producer.get(name)
        if op is None:
            return self._path(name, copy) if name in self.pair.variables else name
        return self._name(op, copy) + name.removeprefix(op.name)

    def _made_at(self, place: PartOutput, part: int) -> str:
        """Return the tensor at the same position in a part of the whole graph."""
        copy, cut = part - self.at, self.fold.cut
        kept = part if copy <= 0 else self.at if copy <= cut else part - cut
        op = self.parts.ops[place.phase, kept][place.op]
        return self._tensor(str(op.outputs[place.output]), copy if 0 < copy <= cut else 0)

    # ------------------------------------------------------------------ ops

    def graph(self) -> LogicalGraph:
        """Return the whole graph."""
        sources = (source.tensor for source in self.base.sources)
        self.tensors = {name: self.base.tensors[name] for name in sources}
        ops = tuple(self._ops())
        return replace(self.base, ops=ops, tensors=self.tensors, results=self._results())

    def _ops(self) -> Iterator[Op]:
        waiting = {FORWARD: range(1, self.fold.cut + 1), BACKWARD: range(self.fold.cut, 0, -1)}
        for op in self.base.ops:
            if self._is_behind(op):
                for copy in waiting.pop(op.phase, ()):
                    for each in self.parts.ops.get((op.phase, self.at), ()):
                        yield self._copy_op(each, copy)
            yield self._copy_op(op, 0)

    def _copy_op(self, op: Op, copy: int) -> Op:
        """Return an op of the whole graph."""
        names = [self._read(op, k, name, copy) for k, name in enumerate(op.inputs)]
        copies = {name: self._tensor(name, copy) for name in op.makes}
        for old, new in copies.items():
            self.tensors[new] = replace(self.base.tensors[old], name=new)
        return replace(
            replace_inputs(op, names),
            name=self._name(op, copy),
            outputs=tuple(name and copies[name] for name in op.outputs),
            module=self._path(op.module, copy),
            moment=self._moment(op, copy),
        )

    def _read(self, op: Op, k: int, name: str, copy: int) -> str:
        """Return the name of input k of an op."""
        _, part = self.parts.of.get(op.name, (op.phase, -1))
        place = self.parts.place.get(name)
        if op.name not in self.pair.modes:
            is_later = part > self.at if part >= 0 else op.phase == BACKWARD
            near = place is not None and place.part in (self.at, self.at + 1)
            if place and near and is_later != (place.part > self.at):
                raise UnlikeError(f"{op} reads a tensor that any of the equal blocks may make")
            return self._tensor(name)
        own, maker = self.pair.modes[op.name][k]
        if not own:
            return self._tensor(name)
        if maker is None:
            return self._path(name, copy)
        here = part + (copy or (self.fold.cut if part > self.at else 0))
        return self._made_at(maker, here + maker.part - self.at)

    def _moment(self, op: Op, copy: int) -> int:
        """Return an op's moment: autograd counts through forward, and backward has its numbers."""
        _, part = self.parts.of.get(op.name, (op.phase, -1))
        is_later = part > self.at if part >= 0 else op.phase == BACKWARD
        if op.moment < 0 or op.name in self.pair.undated:
            parts = 0
        elif op.name in self.pair.modes:
            parts = copy or self.fold.cut * is_later
        else:
            parts = self.fold.cut * (is_later and op.moment >= self.pair.moment)
        return op.moment + parts * self.pair.moments

    def _results(self) -> tuple[tuple[str, str], ...]:
        """Return the results in torch's order: of each kind, that of the variables."""
        order = {v.name: k for k, v in enumerate(self.base.variables)}
        own = f"{self.fold.blocks}.{self.fold.first + 1}."
        kinds: dict[str, list[tuple[int, str, str]]] = {}
        for key, name in self.base.results:
            kind, _, variable = key.partition("/")
            if variable not in order:
                kinds[key] = [(0, key, self._tensor(name))]
                continue
            copies = range(1, self.fold.cut + 1) if variable.startswith(own) else ()
            place = self.parts.place.get(name)
            if copies and (place is None or place.part != self.at):
                raise UnlikeError(f"{key} is not made within its block")
            for copy in (0, *copies):
                new = self._path(variable, copy)
                tensor = self._tensor(name, copy)
                kinds.setdefault(kind, []).append((order[new], f"{kind}/{new}", tensor))
        return tuple((key, name) for kind in kinds.values() for _, key, name in sorted(kind))
