"""keep_lengths: captured -> captured.  Samples and tokens keep a dim each where an axis divides
lengths.

torch merges the leading dims of (samples, tokens, …) for a product or a loss, and no row splits
tokens within a merged dim.  So what reads merged dims works on the unmerged ones: products by
labels (ops/math/matmul.py), losses, sums and what goes element by element.  Other readers get the
merged dim by a view.

Lengths of documents enter whole: their dim 1 counts documents, and each rank reads all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flowrun.engine.capture.rewrites.simplify import drop_dead
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref, map_refs, rename_inputs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import LENGTH_AXES, Shape
from flowrun.engine.ir.sbp import B
from flowrun.engine.ops.flow.ranges import CHECK
from flowrun.engine.ops.math.matmul import PRODUCT
from flowrun.engine.ops.nn.chunked_head import GRADIENT, STATISTICS
from flowrun.engine.ops.nn.cross_entropy import BACKWARD, FORWARD, LOG_SUM_EXP, given
from flowrun.engine.ops.nn.loss import NONE
from flowrun.engine.ops.shapes.shape import dim_groups
from flowrun.engine.ops.traits import has
from flowrun.engine.passes.layout.long_attention import documents_of_attention
from flowrun.engine.strategy import Strategy

_T, _VIEW = "aten.t.default", "aten.view.default"
_SUM, _LSE = "aten.sum.dim_IntList", "aten.logsumexp.default"
_LEADING = "abdefghij"  # labels of leading dims


def keep_lengths(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Return the graph on unmerged dims, if an axis of its ranks divides lengths."""
    if not strategy.divides_lengths:
        return graph
    writer = _LengthWriter(dict(graph.tensors))
    for op in graph.ops:
        writer.add(rename_inputs(op, writer.names))
    whole = tuple((axis, B) for axis in strategy.axes if axis in LENGTH_AXES)
    documents = documents_of_attention(graph)
    feeds = tuple(
        replace(feed, pinned=whole + feed.pinned) if feed.tensor in documents else feed
        for feed in graph.feeds
    )
    results = tuple((key, writer.names.get(name, name)) for key, name in graph.results)
    graph = replace(graph, feeds=feeds)
    graph = replace(graph, ops=tuple(writer.ops), tensors=writer.tensors, results=results)
    return drop_dead(graph)


@dataclass
class _LengthWriter:
    """The ops written so far.

    unmerged: tensor whose first dim merges several -> the tensor of its data with all of them.
    turned: result of a transposition -> what it turns.  names: tensor -> what is read instead.
    """

    tensors: dict[str, LogicalTensor]
    ops: list[Op] = field(default_factory=list)
    unmerged: dict[str, str] = field(default_factory=dict)
    turned: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """Append the op, or its counterpart on unmerged dims and a view of what that makes."""
        if has(op.target, Trait.RESHAPE):
            self._add_view(op)
            return
        alike = has(op.target, Trait.POINTWISE) or op.target == CHECK
        write = _WRITERS.get(op.target, _LengthWriter.add_elementwise if alike else None)
        if write is None or not write(self, op):
            self.ops.append(op)
            if op.target == _T:
                self.turned[op.makes[0]] = op.inputs[0]

    # ------------------------------------------------------------------ views

    def _add_view(self, op: Op) -> None:
        (source,), (output,) = op.inputs, op.makes
        whole = self.unmerged.get(source, source)
        before, after = self._shape(whole), self._shape(output)
        if before == after:
            self.names[output] = whole
            return
        groups = [*dim_groups(before, after)] if 1 not in before + after else []
        if groups and len(groups[0][0]) > 1 and groups[0][1] == [0]:
            dims = (*before[: len(groups[0][0])], *after[1:])
            self.unmerged[output] = whole if dims == before else self._view(op, whole, dims)
        self.ops.append(replace(op, target=_VIEW, args=(Ref(whole), after), kwargs=()))

    def _view(self, op: Op, source: str, shape: Shape) -> str:
        name = self._name(op.makes[0], shape)
        op = replace(op, name=name, target=_VIEW, args=(Ref(source), shape), outputs=(name,))
        self.ops.append(replace(op, kwargs=()))
        return name

    # ------------------------------------------------------------------ counterparts

    def add_product(self, op: Op) -> bool:
        """Rows are those of the first factor; or they are summed, where it is turned."""
        *bias, first, second = op.inputs
        turned = self.turned.get(first)
        if not (rows := self._rows(turned or first)) or op.kwargs:
            return False
        if any(len(self._shape(name)) != 1 for name in bias):
            return False
        lead, of = _LEADING[: len(rows)], Ref(self.unmerged[turned or first])
        if turned is None:
            by, how = (self.turned[second], "nk") if second in self.turned else (second, "kn")
            added = Ref(bias[0]) if bias else None
            equation = f"{lead}k,{how}->{lead}n"
            self._write_on_rows(op, rows, PRODUCT, (of, Ref(by), added, equation))
        elif bias or self._rows(second) != rows:
            return False
        else:
            args = of, Ref(self.unmerged[second]), None, f"{lead}m,{lead}n->mn"
            self._write(op, PRODUCT, args)
        return True

    def add_sum(self, op: Op) -> bool:
        """Sum over the rows, whose dim stays as 1."""
        (source,) = op.inputs
        if not (rows := self._rows(source)) or op.args[1:] != ((0,), True) or op.kwargs:
            return False
        dims = tuple(range(len(rows)))
        name = self._name(op.makes[0], (1,) * len(rows) + self._shape(source)[1:])
        args = (Ref(self.unmerged[source]), dims, True)
        self.ops.append(replace(op, name=name, args=args, outputs=(name,)))
        self._write(op, _VIEW, (Ref(name), self._shape(op.makes[0])))
        return True

    def add_log_sum_exp(self, op: Op) -> bool:
        """Reduce the last dim, which stays as 1."""
        (source,) = op.inputs
        if not (rows := self._rows(source)) or op.args[1:3] != ((1,), True):
            return False
        args = (Ref(self.unmerged[source]), (len(rows),), *op.args[2:])
        self._write_on_rows(op, rows, op.target, args)
        return True

    def add_loss(self, op: Op) -> bool:
        """A reduced cross entropy has the rows of logits, targets and what is kept of each."""
        named = given(op)
        rows = {self._rows(named[name].name) for name in ("x", "lse", "target")}
        if len(rows) != 1 or not (known := rows.pop()) or named["reduction"] == NONE:
            return False
        if op.target == FORWARD:
            self._write(op, op.target, self._with_unmerged(op.args))
        else:
            self._write_on_rows(op, known, op.target, self._with_unmerged(op.args))
        return True

    def add_head(self, op: Op) -> bool:
        """A head in chunks, with its loss: tokens, targets and what is kept of each have rows."""
        (x, _, _, target), (_, reduction, *_), *of_loss = op.args
        grad, lse = of_loss[0][:2] if of_loss else (target, target)
        read = (x, target, lse, grad if reduction == NONE else lse)
        rows = {self._rows(ref.name) for ref in read}
        if len(rows) != 1 or not (known := rows.pop()):
            return False
        outputs = op.outputs[:1] if of_loss else op.outputs
        self._write_on_rows(op, known, op.target, self._with_unmerged(op.args), outputs)
        return True

    def add_elementwise(self, op: Op) -> bool:
        """What goes element by element has the same rows in all operands, or one for all."""
        shape = self._shape(op.makes[0]) if len(op.makes) == 1 else ()
        known = {self._rows(name) for name in op.inputs if self._shape(name)[:1] == shape[:1]}
        ndims = {len(self._shape(name)) for name in op.inputs if name in self.unmerged}
        if ndims != {len(shape)} or len(known) != 1 or not (rows := known.pop()):
            return False
        self._write_on_rows(op, rows, op.target, self._with_unmerged(op.args))
        return True

    # ------------------------------------------------------------------ words

    def _rows(self, name: str) -> Shape:
        """Return the dims that the first one merges; (): none."""
        whole, shape = self.unmerged.get(name), self._shape(name)
        return self._shape(whole)[: len(self._shape(whole)) - len(shape) + 1] if whole else ()

    def _with_unmerged(self, args: tuple[object, ...]) -> tuple[object, ...]:
        found = map_refs(args, lambda ref: Ref(self.unmerged.get(ref.name, ref.name)))
        return found  # type: ignore[no-any-return]

    def _shape(self, name: str) -> Shape:
        return self.tensors[name].shape

    def _name(self, like: str, shape: Shape) -> str:
        name = f"{like}/unmerged"
        self.tensors[name] = replace(self.tensors[like], name=name, shape=shape)
        return name

    def _write(self, op: Op, target: str, args: tuple[object, ...]) -> None:
        self.ops.append(replace(op, target=target, args=args))

    def _write_on_rows(
        self,
        op: Op,
        rows: Shape,
        target: str,
        args: tuple[object, ...],
        outputs: tuple[str | None, ...] = (),
    ) -> None:
        """Write an op, and a view of each output that has rows.  outputs: those; (): all."""
        merged = [name for name in outputs or op.outputs if name]
        for name in merged:
            self.unmerged[name] = self._name(name, (*rows, *self._shape(name)[1:]))
        made = tuple(self.unmerged[name] if name in merged else name for name in op.outputs)
        name = made[0] or op.name
        self.ops.append(replace(op, name=name, target=target, args=args, outputs=made))
        for name in merged:
            to = Ref(self.unmerged[name]), self._shape(name)
            view = replace(op, name=name, target=_VIEW, args=to, kwargs=(), outputs=(name,))
            self.ops.append(view)


_WRITERS: Mapping[str, Callable[[_LengthWriter, Op], bool]] = {
    "aten.mm.default": _LengthWriter.add_product,
    "aten.addmm.default": _LengthWriter.add_product,
    _SUM: _LengthWriter.add_sum,
    _LSE: _LengthWriter.add_log_sum_exp,
    LOG_SUM_EXP: _LengthWriter.add_log_sum_exp,
    FORWARD: _LengthWriter.add_loss,
    BACKWARD: _LengthWriter.add_loss,
    STATISTICS: _LengthWriter.add_head,
    GRADIENT: _LengthWriter.add_head,
}
