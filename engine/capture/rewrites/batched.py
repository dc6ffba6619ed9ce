"""batched: products over samples and heads keep the two dims; a part of simplify.py.

torch merges all batch dims of a product into one: attention of (samples, heads, …) becomes a `bmm`
of (samples x heads, …).  If samples are split, no layout of the merged dim can split heads too.  So
products and transposes are moved before the view that merges the dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.traits import has


def keep_batches(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph with each `bmm` of two merging views as a view of a 4-dim product.

    A merging view turns (a, b, …) into (a x b, …).  Views and transposes that nothing reads any
    more remain.
    """
    writer = _UnmergedWriter(dict(graph.tensors))
    for op in graph.ops:
        writer.add(op)
    return replace(graph, ops=tuple(writer.ops), tensors=writer.tensors)


@dataclass
class _UnmergedWriter:
    """The ops written so far.  unmerged: tensor (a x b, …) -> the tensor (a, b, …) of its data."""

    tensors: dict[str, LogicalTensor]
    ops: list[Op] = field(default_factory=list)
    unmerged: dict[str, str] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """Append the op, after its counterpart on unmerged dims if there is one."""
        if has(op.target, Trait.RESHAPE) and self._merges(op.inputs[0], op.makes[0]):
            self.unmerged[op.makes[0]] = op.inputs[0]
        if op.target == "aten.transpose.int" and {op.args[1] % 3, op.args[2] % 3} == {1, 2}:
            if op.inputs[0] in self.unmerged:
                self._add_on_unmerged_dims(op, op.target, Ref(self.unmerged[op.inputs[0]]), 2, 3)
        elif op.target == "aten.bmm.default" and self._same_batches(*op.inputs):
            first, second = (Ref(self.unmerged[name]) for name in op.inputs)
            whole = self._add_on_unmerged_dims(op, "aten.matmul.default", first, second)
            shape = self.tensors[op.makes[0]].shape
            op = replace(op, target="aten.view.default", args=(Ref(whole), shape))
        self.ops.append(op)

    def _merges(self, source: str, output: str) -> bool:
        whole, merged = self.tensors[source].shape, self.tensors[output].shape
        return len(whole) == 4 and merged == (whole[0] * whole[1], *whole[2:])

    def _same_batches(self, *names: str) -> bool:
        """Return whether all tensors merge dims of the same sizes."""
        wholes = [self.unmerged.get(name) for name in names]
        batches = {self.tensors[whole].shape[:2] if whole else () for whole in wholes}
        return len(batches) == 1 and () not in batches

    def _add_on_unmerged_dims(self, op: Op, target: str, *args: Ref | int) -> str:
        """Append an op on unmerged dims; return what it makes."""
        output = op.makes[0]
        whole = f"{output}_apart"
        read = next(arg.name for arg in args if isinstance(arg, Ref))
        shape = (*self.tensors[read].shape[:2], *self.tensors[output].shape[1:])
        self.tensors[whole] = replace(self.tensors[output], name=whole, shape=shape)
        self.ops.append(replace(op, name=whole, target=target, args=args, outputs=(whole,)))
        self.unmerged[output] = whole
        return whole
