"""unfold: a captured graph with few of many equal blocks -> the graph with all of them, as capture
would have made it, names included.

autograd treats equal blocks in equal ways, each beside its neighbours.  That is looked at, not
assumed: of the blocks that fold.py left, the ops of the second and those of the third, forward and
backward, must be the same but for what a step from one block to the next changes: numbers of
blocks, the numbers in torch's names, and from which neighbour a tensor comes.  Then the second is
repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from flowrun.engine.fold import KEPT, Fold, block_of
from flowrun.engine.graph import BACKWARD, FORWARD, LogicalGraph, Op, Ref, Tensor, map_refs


class UnlikeError(Exception):
    """Blocks that are equal before autograd are not behind it."""


class Place(NamedTuple):
    """Where a tensor is made, by a part of the graph: see _Parts."""

    phase: str
    part: int
    op: int
    output: int


class Mode(NamedTuple):
    """How an op of the repeated part reads a tensor.

    own: not the same one in every part.  place: where it is made, if it is not a variable.
    """

    own: bool
    place: Place | None = None


def unfold(graph: LogicalGraph, fold: Fold) -> LogicalGraph:
    """Put back the blocks that one fold left out.  Raises UnlikeError where that cannot be."""
    return _Unfolding(graph, fold).graph()


class _Parts:
    """Forward ops from the first of a block to the first of the next; backward ops from the first
    of a block to the first of the one before.  Of `numbers` of blocks; the parts count from 0.
    """

    def __init__(self, graph: LogicalGraph, blocks: str) -> None:
        self.ops: dict[tuple[str, int], list[Op]] = {}
        self.numbers: list[int] = []
        self.place: dict[str, Place] = {}  # tensor -> where
        self.of: dict[str, tuple[str, int]] = {}  # op -> phase and part
        at = {FORWARD: -1, BACKWARD: -1}
        for op in graph.ops:
            number, phase = block_of(op.module, blocks), op.phase
            if number is not None and phase == FORWARD and number not in self.numbers:
                self.numbers.append(number)
            part = self.numbers.index(number) if number in self.numbers else -1
            first = at[phase] < 0
            if part >= 0 and (first or (part > at[phase]) == (phase == FORWARD)):
                at[phase] = part
            if at[phase] >= 0:
                key = self.of[op.name] = phase, at[phase]
                ops = self.ops.setdefault(key, [])
                for k, name in enumerate(op.outputs):
                    if name is not None:
                        self.place[name] = Place(*key, len(ops), k)
                ops.append(op)


class _Unfolding:
    """`at`: the part that is repeated.  Parts behind it are `fold.cut` further on then, and so are
    the blocks between it and those that were left out.
    """

    def __init__(self, graph: LogicalGraph, fold: Fold) -> None:
        self.base = graph
        self.fold = fold
        self.parts = _Parts(graph, fold.blocks)
        self.at = self._second()
        self.variables = {v.tensor for v in graph.variables}
        self.modes: dict[str, tuple[Mode, ...]] = {}  # op of the two parts -> how it reads
        self.steps: dict[tuple[str, str], int] = {}  # phase and word -> names with it in a part
        self.moments = self.moment = 0  # that a part takes; the first of the repeated one
        self.undated: set[str] = set()  # ops of the two parts with one moment
        for phase in (FORWARD, BACKWARD):
            self._compare(phase)

    def _second(self) -> int:
        numbers, first = self.parts.numbers, self.fold.first
        at = numbers.index(first) if first in numbers else 0
        if numbers[at : at + KEPT] != [*range(first, first + KEPT)]:
            raise UnlikeError(f"blocks of {self.fold.blocks} do not follow each other")
        return at + 1

    # ------------------------------------------------------------------ two parts that are alike

    def _compare(self, phase: str) -> None:
        """The repeated part with the next."""
        these, those = (self.parts.ops.get((phase, self.at + k), []) for k in (0, 1))
        if len(these) != len(those):
            raise UnlikeError(f"{phase} of blocks of {self.fold.blocks} has not as many ops each")
        for this, that in zip(these, those, strict=True):
            if self._described(this, 0) != self._described(that, 1):
                raise UnlikeError(f"{this} is unlike {that}")
            pairs = zip(this.inputs, that.inputs, strict=True)
            self.modes[this.name] = self.modes[that.name] = tuple(
                self._mode(a, b) for a, b in pairs
            )
            (word, number), (_, other) = _numbered(this.name), _numbered(that.name)
            step = abs(other - number)
            if self.steps.setdefault((phase, word), step) != step:
                raise UnlikeError(
                    f"the names of {this} and {that} do not tell how many are between"
                )
            if phase == FORWARD and this.moment >= 0:
                self.moments, self.moment = that.moment - this.moment, self.moment or this.moment
            if this.moment == that.moment:
                self.undated |= {this.name, that.name}

    def _described(self, op: Op, part: int) -> tuple[Any, ...]:
        """What must be equal of an op of the repeated part and of the next."""
        made = [n and self.base.tensors[n] for n in op.outputs]
        return (
            _numbered(op.name)[0],
            op.target,
            map_refs(op.args, lambda _: Ref("")),
            map_refs(op.kwargs, lambda _: Ref("")),
            [(t.shape, t.dtype) if t else None for t in made],
            self._inside(op.module, part),
        )

    def _mode(self, this: str, that: str) -> Mode:
        """How what a part reads is what the next part reads in its place."""
        if this == that:
            return Mode(False)
        if {this, that} <= self.variables:
            if self._inside(this, 0) == self._inside(that, 1):
                return Mode(True)
        elif this in self.parts.place and that in self.parts.place:
            place = self.parts.place[this]
            following = place._replace(part=place.part + 1)
            if following == self.parts.place[that] and abs(place.part - self.at) <= 1:
                return Mode(True, place)
        raise UnlikeError(f"%{this} and %{that} are not read alike")

    def _inside(self, path: str, part: int) -> tuple[bool, str]:
        """A path as seen from the block of the repeated part, or of the next."""
        own = f"{self.fold.blocks}.{self.fold.first + 1 + part}"
        inside = f"{path}.".startswith(f"{own}.")
        return inside, path.removeprefix(own) if inside else path

    # ------------------------------------------------------------------ names

    def _renamed(self, op: Op, copy: int) -> str:
        """torch numbers ops of one word in the order in which it makes them.  copy: of the repeated
        part, from 1; 0: the op itself.
        """
        word, number = _numbered(op.name)
        forward, backward = (self.steps.get((p, word), 0) for p in (FORWARD, BACKWARD))
        cut, moved = self.fold.cut, copy or self.fold.cut * self._is_behind(op)
        if op.phase == FORWARD:
            number += forward * moved
        else:
            number += forward * cut + backward * (cut - copy if copy else moved)
        return f"{word}_{number}" if number else word

    def _is_behind(self, op: Op) -> bool:
        """True behind the place where parts of its phase are put in."""
        phase, part = self.parts.of.get(op.name, (op.phase, -1))
        return part >= 0 and (part > self.at) == (phase == FORWARD)

    def _path(self, path: str, copy: int) -> str:
        """Of a module or a variable; of what the repeated part has for itself, where copy > 0."""
        number, fold = block_of(path, self.fold.blocks), self.fold
        if number is None:
            return path
        if number == fold.first + 1:
            more = copy
        else:
            more = fold.cut if fold.first + 1 < number < fold.first + KEPT else 0
        return f"{fold.blocks}.{number + more}" + path.removeprefix(f"{fold.blocks}.{number}")

    def _tensor(self, name: str, copy: int = 0) -> str:
        """What a tensor of the folded graph is called; copy: as in _renamed."""
        op = self.base.producer.get(name)
        if op is None:
            return self._path(name, copy) if name in self.variables else name
        return self._renamed(op, copy) + name.removeprefix(op.name)

    def _made_at(self, place: Place, part: int) -> str:
        """The tensor at the same place in a part of the whole graph."""
        copy, cut = part - self.at, self.fold.cut
        kept = part if copy <= 0 else self.at if copy <= cut else part - cut
        op = self.parts.ops[place.phase, kept][place.op]
        return self._tensor(str(op.outputs[place.output]), copy if 0 < copy <= cut else 0)

    # ------------------------------------------------------------------ ops

    def graph(self) -> LogicalGraph:
        """All ops, with those of the blocks that were left out."""
        sources = [*(v.tensor for v in self.base.variables), *(f.tensor for f in self.base.feeds)]
        self.tensors: dict[str, Tensor] = {name: self.base.tensors[name] for name in sources}
        ops = tuple(self._ops())
        return replace(self.base, ops=ops, tensors=self.tensors, results=self._results())

    def _ops(self) -> Iterator[Op]:
        waiting = {
            FORWARD: range(1, self.fold.cut + 1),
            BACKWARD: range(self.fold.cut, 0, -1),
        }
        for op in self.base.ops:
            if self._is_behind(op):
                for copy in waiting.pop(op.phase, ()):
                    for each in self.parts.ops.get((op.phase, self.at), ()):
                        yield self._put(each, copy)
            yield self._put(op, 0)

    def _put(self, op: Op, copy: int) -> Op:
        """An op in the whole graph, or a copy of it."""
        names = iter([self._read(op, k, name, copy) for k, name in enumerate(op.inputs)])
        swap = lambda _: Ref(next(names))  # noqa: E731
        made = {name: self._tensor(name, copy) for name in op.makes}
        for old, new in made.items():
            self.tensors[new] = replace(self.base.tensors[old], name=new)
        return replace(
            op,
            name=self._renamed(op, copy),
            args=map_refs(op.args, swap),
            kwargs=map_refs(op.kwargs, swap),
            outputs=tuple(name and made[name] for name in op.outputs),
            module=self._path(op.module, copy),
            moment=self._moment(op, copy),
        )

    def _read(self, op: Op, k: int, name: str, copy: int) -> str:
        """Input k of an op in the whole graph, or of a copy of it."""
        _, part = self.parts.of.get(op.name, (op.phase, -1))
        place = self.parts.place.get(name)
        if op.name not in self.modes:
            behind = part > self.at if part >= 0 else op.phase == BACKWARD
            near = place is not None and place.part in (self.at, self.at + 1)
            if place and near and behind != (place.part > self.at):
                raise UnlikeError(f"{op} reads what may be of any of the equal blocks")
            return self._tensor(name)
        own, made = self.modes[op.name][k]
        if not own:
            return self._tensor(name)
        if made is None:
            return self._path(name, copy)
        here = part + (copy or (self.fold.cut if part > self.at else 0))
        return self._made_at(made, here + made.part - self.at)

    def _moment(self, op: Op, copy: int) -> int:
        """autograd counts through forward; backward goes by the numbers of forward, about."""
        _, part = self.parts.of.get(op.name, (op.phase, -1))
        behind = part > self.at if part >= 0 else op.phase == BACKWARD
        if op.moment < 0 or op.name in self.undated:
            parts = 0
        elif op.name in self.modes:
            parts = copy or self.fold.cut * behind
        else:
            parts = self.fold.cut * (behind and op.moment >= self.moment)
        return op.moment + parts * self.moments

    def _results(self) -> tuple[tuple[str, str], ...]:
        """In the order of torch's outputs: of each kind, that of the variables."""
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
                raise UnlikeError(f"{key} is not made with its block")
            for copy in (0, *copies):
                new = self._path(variable, copy)
                made = self._tensor(name, copy)
                kinds.setdefault(kind, []).append((order[new], f"{kind}/{new}", made))
        return tuple((key, name) for kind in kinds.values() for _, key, name in sorted(kind))


_NUMBERED = re.compile(r"(.+?)_([1-9]\d*)")


def _numbered(name: str) -> tuple[str, int]:
    """torch's name of a node: a word, and which one with that word."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)
