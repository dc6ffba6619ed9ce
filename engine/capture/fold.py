"""fold: torch's graph of a module, before autograd sees it -> the same with fewer of its equal
blocks; unfold.py puts them back behind autograd.

What a block computes is compared as torch's graph has it, after Python has run: call by call, with
its constants and the shapes of its weights.  So it does not matter how a module's code came to its
calls, and nothing is assumed of classes, configurations or hooks.  Blocks that differ in anything
stay, all of them, as does a block from which others than the next one read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from flowrun.engine.capture.joint_graph import module_of
from flowrun.engine.ir.module_path import block_of

LEAST = 10  # equal blocks that are worth it
KEPT = 4  # of them stay: two that autograd must treat alike, and one on either side


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks of one list that were left out.

    blocks: dotted path of the list.  first: the first of KEPT equal blocks that stay.  cut: how
    many more were behind them.
    """

    blocks: str
    first: int
    cut: int


def fold(graph: fx.Graph, entering: Mapping[fx.Node, str]) -> tuple[Fold, ...]:
    """Take equal blocks out of the graph.

    entering: placeholders of weights and buffers, with their names.
    """
    found: list[Fold] = []
    paths = {node: module_of(node) for node in graph.nodes if node.op not in _ENDS}
    for blocks in _lists(paths.values()):
        if not any(f"{blocks}.".startswith(f"{other.blocks}.") for other in found):
            line = _BlockSequence(paths, entering, blocks)
            first, end = line.longest()
            cut = end - first - KEPT
            if end - first >= LEAST and line.take_out(graph, first + KEPT, end):
                found.append(Fold(blocks, line.numbers[first], cut))
    return tuple(found)


_ENDS = ("placeholder", "output")


def _lists(paths: Iterable[str]) -> list[str]:
    """Paths in front of a number, outermost first; without that of a model which is a list itself:
    unfold.py finds blocks by the path in front of them.
    """
    found: dict[str, None] = {}
    for path in dict.fromkeys(paths):
        parts = path.split(".")
        for k, part in enumerate(parts):
            if k and part.isdigit():
                found[".".join(parts[:k])] = None
    return sorted(found, key=lambda path: path.count("."))


class _BlockSequence:
    """The calls of a graph as a line of blocks of one list: each from its first call to that of the
    next, so that what is computed between two blocks belongs to the first.
    """

    def __init__(
        self, paths: Mapping[fx.Node, str], entering: Mapping[fx.Node, str], blocks: str
    ) -> None:
        self.paths = paths
        self.entering = entering
        self.blocks = blocks
        self.numbers: list[int] = []
        self.parts: list[list[fx.Node]] = []
        self.at: dict[fx.Node, tuple[int, int]] = {}  # call -> part, place in it
        for node, path in paths.items():
            number = block_of(path, blocks)
            if number is not None and number not in self.numbers:
                self.numbers.append(number)
                self.parts.append([])
            if self.parts:
                self.at[node] = len(self.parts) - 1, len(self.parts[-1])
                self.parts[-1].append(node)

    def longest(self) -> tuple[int, int]:
        """First and end of the most parts on end that are alike; the last part has no end."""
        best, first, before = (0, 0), 0, None
        for part in range(len(self.parts) - 2):
            reads = self._alike(part)
            if reads is None or reads != before:
                first, before = part, reads
            if reads is not None and part + 2 - first > best[1] - best[0]:
                best = first, part + 2
        return best

    def take_out(self, graph: fx.Graph, first: int, end: int) -> bool:
        """Remove parts; who read of the last of them reads of the last before them.  False if
        somebody behind reads of others: nothing has changed then.
        """
        alike = range(first - KEPT + 1, end - 1)
        if any(self._read_behind(part, end) for part in alike):
            return False
        for node, stays in zip(self.parts[end - 1], self.parts[first - 1], strict=True):
            node.replace_all_uses_with(stays, lambda user: self.at.get(user, (end, 0))[0] >= end)
        for part in reversed(self.parts[first:end]):
            for node in reversed(part):
                graph.erase_node(node)
        return True

    def _read_behind(self, part: int, end: int) -> bool:
        users = (user for node in self.parts[part] for user in node.users)
        return any(self.at.get(user, (end, 0))[0] >= end for user in users)

    def _alike(self, part: int) -> tuple[int | None, ...] | None:
        """How each tensor that a part reads is the one that the next part reads in its place: None
        if it is the same, else how many parts before.  None if the parts differ.
        """
        these, those = self.parts[part], self.parts[part + 1]
        reads: list[int | None] = []
        if len(these) != len(those) or self.numbers[part] + 1 != self.numbers[part + 1]:
            return None
        for this, that in zip(these, those, strict=True):
            if not self._same_call(part, this, that, reads):
                return None
        return None if any(n is not None and n > 1 for n in reads) else tuple(reads)

    def _same_call(self, part: int, this: fx.Node, that: fx.Node, reads: list[int | None]) -> bool:
        return (
            (this.op, this.target) == (that.op, that.target)
            and self._inside(self.paths[this], part) == self._inside(self.paths[that], part + 1)
            and self._same(part, this.args, that.args, reads)
            and self._same(part, this.kwargs, that.kwargs, reads)
        )

    def _same(self, part: int, this: Any, that: Any, reads: list[int | None]) -> bool:
        if type(this) is not type(that):
            return False
        if isinstance(this, fx.Node):
            return self._same_tensor(part, this, that, reads)
        if isinstance(this, tuple | list):
            pairs = itertools.zip_longest(this, that, fillvalue=_NOTHING)
            return all(self._same(part, a, b, reads) for a, b in pairs)
        if isinstance(this, dict):
            return list(this) == list(that) and all(
                self._same(part, this[key], that[key], reads) for key in this
            )
        if isinstance(this, slice):
            these, those = ((s.start, s.stop, s.step) for s in (this, that))
            return self._same(part, these, those, reads)
        return bool(this == that)

    def _same_tensor(
        self, part: int, this: fx.Node, that: fx.Node, reads: list[int | None]
    ) -> bool:
        if this is that:
            reads.append(None)
            return True
        if this in self.at and that in self.at:
            (of, place), (next_of, next_place) = self.at[this], self.at[that]
            reads.append(part - of)
            return of + 1 == next_of and place == next_place
        if this not in self.entering or that not in self.entering:
            return False
        names = self._inside(self.entering[this], part), self._inside(self.entering[that], part + 1)
        return names[0] == names[1] and _described(this) == _described(that)

    def _inside(self, path: str, part: int) -> tuple[bool, str]:
        """A path as seen from the block of a part."""
        inside = block_of(path, self.blocks) == self.numbers[part]
        own = f"{self.blocks}.{self.numbers[part]}"
        return inside, path.removeprefix(own) if inside else path


_NOTHING = object()


def _described(node: fx.Node) -> tuple[Any, ...]:
    """What autograd may know of a weight."""
    value = node.meta["example_value"]
    return value.shape, value.stride(), value.dtype, value.requires_grad, type(value)
