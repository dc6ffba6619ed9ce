"""batched: products over samples and heads keep both as dims; part of simplify.py.

Torch merges all batch dims of a product into one: attention of (samples, heads, …) becomes a `bmm`
of (samples x heads, …).  Where samples are split already, no layout of the merged dim says that
heads are.  So products and transposes run on what such a view shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ops.op_info import Trait
from flowrun.engine.ops.traits import has


def keep_batches(graph: LogicalGraph) -> LogicalGraph:
    """Every `bmm` of two views that merge (a, b) into a x b is a product of what they show, and
    what it makes a view of that.  Views and transposes that nobody reads any more stay behind.
    """
    apart = _Apart(dict(graph.tensors))
    for op in graph.ops:
        apart.add(op)
    return replace(graph, ops=tuple(apart.ops), tensors=apart.tensors)


@dataclass
class _Apart:
    """shows: a tensor whose first dim merges the first two of another -> that other."""

    tensors: dict[str, LogicalTensor]
    ops: list[Op] = field(default_factory=list)
    shows: dict[str, str] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """The op, and what it is on the dims that were merged."""
        if has(op.target, Trait.RESHAPE) and self._merges(op.inputs[0], op.makes[0]):
            self.shows[op.makes[0]] = op.inputs[0]
        if op.target == "aten.transpose.int" and {op.args[1] % 3, op.args[2] % 3} == {1, 2}:
            if op.inputs[0] in self.shows:
                self._made(op, op.target, Ref(self.shows[op.inputs[0]]), 2, 3)
        elif op.target == "aten.bmm.default" and self._same_batches(*op.inputs):
            first, second = (Ref(self.shows[name]) for name in op.inputs)
            whole = self._made(op, "aten.matmul.default", first, second)
            shape = self.tensors[op.makes[0]].shape
            op = replace(op, target="aten.view.default", args=(Ref(whole), shape))
        self.ops.append(op)

    def _merges(self, source: str, made: str) -> bool:
        whole, merged = self.tensors[source].shape, self.tensors[made].shape
        return len(whole) == 4 and merged == (whole[0] * whole[1], *whole[2:])

    def _same_batches(self, *names: str) -> bool:
        """True if all merge the same dims."""
        found = {self.tensors[self.shows[n]].shape[:2] if n in self.shows else () for n in names}
        return len(found) == 1 and () not in found

    def _made(self, op: Op, target: str, *args: Ref | int) -> str:
        """A new op on the dims apart; what it makes."""
        made = op.makes[0]
        whole = f"{made}_apart"
        read = next(arg.name for arg in args if isinstance(arg, Ref))
        shape = (*self.tensors[read].shape[:2], *self.tensors[made].shape[1:])
        self.tensors[whole] = replace(self.tensors[made], name=whole, shape=shape)
        self.ops.append(replace(op, name=whole, target=target, args=args, outputs=(whole,)))
        self.shows[made] = whole
        return whole
