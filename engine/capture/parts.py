"""parts: the ops of a captured graph as a sequence of equal blocks, forward and backward.

Two neighbouring blocks are compared, and what differs between them shows unfold.py how to repeat
the first of them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from flowrun.engine.capture.fold import Fold
from flowrun.engine.capture.patches.alike_blocks import KEPT_BLOCKS
from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph, Op, Ref, map_refs
from flowrun.engine.ir.module_path import block_of


class UnlikeError(Exception):
    """Blocks that are equal before autograd differ after it."""


class PartOutput(NamedTuple):
    """The position of a tensor: output of an op of a part of a phase (see Parts)."""

    phase: str
    part: int
    op: int
    output: int


class Mode(NamedTuple):
    """The way in which an op of the repeated part reads a tensor.

    own: each part reads a tensor of its own.  place: its position, if it is not a variable.
    """

    own: bool
    place: PartOutput | None = None


class Parts:
    """The ops of a graph in parts, one for each block of a list, numbered from 0.

    A part has the forward ops from the first of a block to the first of the next, and the backward
    ops from the first of a block to the first of the block before.
    ops: (phase, part) -> its ops.  numbers: number of each part's block.  place: tensor -> its
    position.  of: name of an op -> (phase, part).
    """

    def __init__(self, graph: LogicalGraph, blocks: str) -> None:
        self.ops: dict[tuple[str, int], list[Op]] = {}
        self.numbers: list[int] = []
        self.place: dict[str, PartOutput] = {}
        self.of: dict[str, tuple[str, int]] = {}
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
                        self.place[name] = PartOutput(*key, len(ops), k)
                ops.append(op)


class Pair:
    """The part that is repeated, number `at`, and the next one.

    UnlikeError is raised if they differ in more than a step from one block to the next changes.
    modes: name of an op of either -> how it reads each input.
    steps: (phase, word) -> number of names with this word in a part.
    moments: number of autograd's moments in a part.  moment: the first of the repeated part.
    undated: ops that have the same moment in both.
    """

    def __init__(self, graph: LogicalGraph, fold: Fold) -> None:
        self.base = graph
        self.fold = fold
        self.parts = Parts(graph, fold.blocks)
        self.at = self._second()
        self.variables = {v.tensor for v in graph.variables}
        self.modes: dict[str, tuple[Mode, ...]] = {}
        self.steps: dict[tuple[str, str], int] = {}
        self.moments = self.moment = 0
        self.undated: set[str] = set()
        for phase in (FORWARD, BACKWARD):
            self._compare(phase)

    def _second(self) -> int:
        numbers, first = self.parts.numbers, self.fold.first
        at = numbers.index(first) if first in numbers else 0
        if numbers[at : at + KEPT_BLOCKS] != [*range(first, first + KEPT_BLOCKS)]:
            raise UnlikeError(f"blocks of {self.fold.blocks} do not follow each other")
        return at + 1

    def _compare(self, phase: str) -> None:
        """Compare the repeated part with the next in one phase."""
        these, those = (self.parts.ops.get((phase, self.at + k), []) for k in (0, 1))
        if len(these) != len(those):
            raise UnlikeError(f"blocks of {self.fold.blocks} differ in the number of {phase} ops")
        for this, that in zip(these, those, strict=True):
            if self._describe(this, 0) != self._describe(that, 1):
                raise UnlikeError(f"{this} is unlike {that}")
            modes = tuple(map(self._mode, this.inputs, that.inputs))
            self.modes[this.name] = self.modes[that.name] = modes
            (word, number), (_, other) = split_number(this.name), split_number(that.name)
            step = abs(other - number)
            if self.steps.setdefault((phase, word), step) != step:
                raise UnlikeError(f"the numbers in the names of {this} and {that} are irregular")
            if phase == FORWARD and this.moment >= 0:
                self.moments, self.moment = that.moment - this.moment, self.moment or this.moment
            if this.moment == that.moment:
                self.undated |= {this.name, that.name}

    def _describe(self, op: Op, part: int) -> tuple[object, ...]:
        """Return what must be equal for an op of the repeated part and its counterpart."""
        given = map_refs((op.args, op.kwargs), lambda _: Ref(""))
        outputs = [n and replace(self.base.tensors[n], name="") for n in op.outputs]
        return split_number(op.name)[0], op.target, given, outputs, self._inside(op.module, part)

    def _mode(self, this: str, that: str) -> Mode:
        """Return how the repeated part reads `this`, given that the next part reads `that`."""
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
        raise UnlikeError(f"equal blocks read %{this} and %{that} in different ways")

    def _inside(self, path: str, part: int) -> tuple[bool, str]:
        """Return (is it inside the block of part `at` + part, the path from there)."""
        own = f"{self.fold.blocks}.{self.fold.first + 1 + part}"
        inside = f"{path}.".startswith(f"{own}.")
        return inside, path.removeprefix(own) if inside else path


_NUMBERED = re.compile(r"(.+?)_([1-9]\d*)")


def split_number(name: str) -> tuple[str, int]:
    """Split torch's name of a node into a word and the number of the node with that word."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)
