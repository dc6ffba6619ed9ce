"""fold: torch's graph of a module before autograd -> the same graph with fewer equal blocks.

unfold.py adds the others again after autograd.  Blocks are compared as torch's graph has them,
after Python has run: call by call, with constants and the shapes of weights.  So it does not matter
which code made the calls, and nothing is assumed of classes, configurations or hooks.  If blocks
differ in anything all of them stay; so does a block that others than the next one read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from flowrun.engine.capture.joint_graph import module_of
from flowrun.engine.capture.patches.alike_blocks import (
    KEPT_BLOCKS,
    MIN_BLOCKS,
    AbsentBlocks,
    call_block,
)
from flowrun.engine.ir.module_path import block_of


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks of one list that were left out.

    blocks: dotted path of the list.  first: number of the first of KEPT_BLOCKS equal blocks that
    stay.  cut: number of equal blocks that followed them.
    """

    blocks: str
    first: int
    cut: int


def fold(
    graph: fx.Graph, entering: Mapping[fx.Node, str], absent: Collection[str]
) -> tuple[Fold, ...]:
    """Remove equal blocks, and marks of calls, from the graph; return what was removed.

    entering: placeholder of a weight or buffer -> its name.  absent: paths of blocks of which the
    marks are all.
    """
    folds: list[Fold] = []
    paths = {node: module_of(node) for node in graph.nodes if node.op not in _ENDS}
    for blocks in _list_paths(paths.values()):
        if not any(f"{blocks}.".startswith(f"{other.blocks}.") for other in folds):
            sequence = _BlockSequence(paths, entering, blocks, absent)
            first, end = sequence.find_longest()
            cut = end - first - KEPT_BLOCKS
            if end - first >= MIN_BLOCKS and sequence.remove(graph, first + KEPT_BLOCKS, end):
                folds.append(Fold(blocks, sequence.numbers[first], cut))
    marks = [node for node in graph.nodes if node.target is call_block]
    for mark in marks:
        mark.replace_all_uses_with(mark.args[0])
        graph.erase_node(mark)
    return () if any(paths[mark] in absent for mark in marks) else tuple(folds)


def are_folded(runs: Sequence[AbsentBlocks], folds: Collection[Fold]) -> bool:
    """Return whether all that torch did not trace is among the blocks that folds repeat."""
    repeated = {(f.blocks, f.first + KEPT_BLOCKS + k) for f in folds for k in range(f.cut)}
    return repeated.issuperset((run.blocks, number) for run in runs for number in run.absent)


_ENDS = ("placeholder", "output")


def _list_paths(paths: Iterable[str]) -> list[str]:
    """Return the paths of lists of modules, outermost first.

    A model that is a list itself is left out, as unfold.py needs a path to find blocks.
    """
    listed: dict[str, None] = {}
    for path in dict.fromkeys(paths):
        parts = path.split(".")
        for k, part in enumerate(parts):
            if k and part.isdigit():
                listed[".".join(parts[:k])] = None
    return sorted(listed, key=lambda path: path.count("."))


class _BlockSequence:
    """The calls of a graph in parts, one for each block of a list.

    A part goes from the first call of a block to that of the next, so that calls between two blocks
    belong to the first.  paths: call -> module.  at: call -> (part, position in it).
    """

    def __init__(
        self,
        paths: Mapping[fx.Node, str],
        entering: Mapping[fx.Node, str],
        blocks: str,
        absent: Collection[str],
    ) -> None:
        self.paths = paths
        self.entering = entering
        self.blocks = blocks
        self.numbers: list[int] = []
        self.parts: list[list[fx.Node]] = []
        self.at: dict[fx.Node, tuple[int, int]] = {}
        for node, path in paths.items():
            number = block_of(path, blocks)
            if number is not None and number not in self.numbers:
                self.numbers.append(number)
                self.parts.append([])
            if self.parts:
                self.at[node] = len(self.parts) - 1, len(self.parts[-1])
                self.parts[-1].append(node)
        self.absent = {
            part for part, number in enumerate(self.numbers) if f"{blocks}.{number}" in absent
        }
        for part in sorted(self.absent):  # its mark stands for what the block returns
            mark = self.parts[part][0]
            of, place = self.at.get(mark.args[0], (-1, 0))  # type: ignore[arg-type]
            self.at[mark] = part, place if of == part - 1 else -1

    def find_longest(self) -> tuple[int, int]:
        """Return (first, end) of the longest run of equal parts; the last part is never equal."""
        best, first, before = (0, 0), 0, None
        for part in range(len(self.parts) - 2):
            reads = self._compare(part)
            if part + 1 in self.absent and before and reads == before[: len(reads or ())]:
                reads = before  # called alike: the rest follows
            if reads is None or reads != before:
                first, before = part, reads
            if reads is not None and part + 2 - first > best[1] - best[0]:
                best = first, part + 2
        return best

    def remove(self, graph: fx.Graph, first: int, end: int) -> bool:
        """Remove the parts from `first` to `end` from the graph; return whether it is possible.

        Readers of the last part then read the last part that stays.  It is not possible if calls
        after the parts read any other of them.
        """
        if any(self._is_read_after(part, end) for part in range(first - KEPT_BLOCKS + 1, end - 1)):
            return False
        if self.at[self.parts[end - 1][0]][1] < 0:
            return False  # a mark that does not stand for what the block before returned
        for node in self.parts[end - 1]:
            stays = self.parts[first - 1][self.at[node][1]]
            node.replace_all_uses_with(stays, lambda user: self.at.get(user, (end, 0))[0] >= end)
        for part in reversed(self.parts[first:end]):
            for node in reversed(part):
                graph.erase_node(node)
        return True

    def _is_read_after(self, part: int, end: int) -> bool:
        users = (user for node in self.parts[part] for user in node.users)
        return any(self.at.get(user, (end, 0))[0] >= end for user in users)

    def _compare(self, part: int) -> tuple[int | None, ...] | None:
        """Compare a part with the next; None if they differ.

        Else return for each tensor that the part reads how many parts before it was made; -1 for a
        weight of the block, None for a tensor that both parts read.
        """
        these, those = self.parts[part], self.parts[part + 1]
        if part + 1 in self.absent:
            these = these[:1]
        if len(these) != len(those) or self.numbers[part] + 1 != self.numbers[part + 1]:
            return None
        reads: list[int | None] = []
        for this, that in zip(these, those, strict=True):
            (call, ours), (next_call, theirs) = self._call(this, part), self._call(that, part + 1)
            if call != next_call:
                return None
            for a, b in zip(ours, theirs, strict=True):
                if not self._correspond(part, a, b):
                    return None
                before = part - self.at[a][0] if a in self.at else -1
                reads.append(None if a is b else before)
        return None if any(n is not None and n > 1 for n in reads) else tuple(reads)

    def _call(self, node: fx.Node, part: int) -> tuple[tuple[object, ...], list[fx.Node]]:
        """Return a call without the tensors that it reads, and these tensors."""
        reads: list[fx.Node] = []

        def take(read: fx.Node) -> str:
            reads.append(read)
            return "tensor"

        constants = repr(fx.map_arg((node.args, node.kwargs), take))
        inside = self._inside(self.paths[node], part)
        return (node.op, node.target, inside, constants, len(reads)), reads

    def _correspond(self, part: int, this: fx.Node, that: fx.Node) -> bool:
        """Return whether the next part reads `that` as the part reads `this`."""
        if this is that:
            return True
        if this in self.at and that in self.at:
            (of, place), (next_of, next_place) = self.at[this], self.at[that]
            return of + 1 == next_of and place == next_place
        if this not in self.entering or that not in self.entering:
            return False
        names = self._inside(self.entering[this], part), self._inside(self.entering[that], part + 1)
        return names[0] == names[1] and _weight_form(this) == _weight_form(that)

    def _inside(self, path: str, part: int) -> tuple[bool, str]:
        """Return (is it inside of the part's block, the path from there)."""
        inside = block_of(path, self.blocks) == self.numbers[part]
        own = f"{self.blocks}.{self.numbers[part]}"
        return inside, path.removeprefix(own) if inside else path


def _weight_form(node: fx.Node) -> tuple[object, ...]:
    """Return all that autograd may know of a weight."""
    value = node.meta["example_value"]
    return value.shape, value.stride(), value.dtype, value.requires_grad, type(value)
