"""hoist_weights: laid_out -> signed, in part.  Tensors made of weights alone are made once a step.

A cast of a weight has the same value in every micro-batch.  It moves to phase weights, before
forward, and the boxing of its output moves with it.  An op that may stand on either side of a
boxing then goes to the side where fewer bytes move:

    cast before gather    a tensor made of weights that has at most their bytes, or of which
                          only such are made, is made at their home: a shard of ZeRO is cast, then
                          gathered in bf16 (ZeRO 3: with each gather, insert_boxing.py); a tied
                          weight crosses stages alike
    reduce before gather  the largest of a shard, then of all ranks' (the scale of 8 bits)
    reduce before cast    a gradient that goes to a sharded accumulator (ZeRO 2, 3) is reduced in
                          the dtype that it was computed in, then cast and accumulated in fp32; one
                          that is accumulated before it is reduced is reduced in fp32
    cast before reduce    the reverse, if precision.reduce_dtype asks for it: a gradient is cast as
                          it was computed, a partial sum, and all are reduced in fp32
    view after boxing     a view of a weight costs nothing: the weight is boxed once a step to the
                          layouts that the readers of the view need

Activations need no such rules: infer_sbp counts the bytes of a layout on either side of a cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flowrun.engine.ir.graph import (
    COUNT,
    FORWARD,
    UPDATE,
    WEIGHTS,
    LogicalGraph,
    LogicalTensor,
    Op,
    rename_inputs,
)
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import NdSbp, Partial, Sbp, format_nd_sbp
from flowrun.engine.ir.signature import NdSignature, Signature
from flowrun.engine.ops import registry
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.traits import has, is_engine_op, is_view
from flowrun.engine.strategy import Strategy


def hoist_weights(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Move ops on weights alone to phase weights, near the homes of the weights.

    Views of weights and widening casts of gradients get the layouts that their readers need.
    """
    hoister = _Hoister(graph, strategy)
    for op in graph.ops:
        hoister.prepare(op)
    for op in reversed(graph.ops):
        hoister.follow(op)
    return hoister.graph()


class _Hoister:
    """The ops as they change.  twins: op -> copies of it for readers that need another layout."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.base = graph
        self.strategy = strategy
        self.tensors = dict(graph.tensors)
        self.ops = {op.name: op for op in graph.ops}
        self.twins: dict[str, list[str]] = {}
        self.readers = {name: [op.name for op in ops] for name, ops in graph.consumers.items()}
        # tensors that exist before forward without a boxing: (stage, nd-SBP)
        self.homes = {v.tensor: (v.stage, v.nd_sbp) for v in graph.variables}
        # tensor of weights -> the weights of which it is made
        self.roots = {v.tensor: {v.tensor} for v in graph.variables}
        for op in filter(self._of_weights, graph.ops):
            roots = set().union(*(self.roots[name] for name in op.inputs))
            self.roots.update(dict.fromkeys(op.makes, roots))

    # ------------------------------------------------------------------ from weights to readers

    def prepare(self, op: Op) -> None:
        """Move an op on weights alone to phase weights, and to their home if it is small."""
        if not self._of_weights(op):
            return
        at_home = self._move_home(op) if self._is_small(op) else None
        if not _makes_memory(op):
            if at_home is not None:
                self._record_homes(at_home)
            return
        hoisted = replace(at_home or op, phase=WEIGHTS)
        self.ops[op.name] = hoisted
        self._record_homes(hoisted)

    def _of_weights(self, op: Op) -> bool:
        weights = self.base.of_weights
        return bool(op.makes) and op.phase not in (COUNT, UPDATE) and weights.issuperset(op.makes)

    def _num_bytes(self, names: Iterable[str]) -> int:
        return sum(self.tensors[name].num_bytes for name in names)

    def _is_small(self, op: Op) -> bool:
        """Return whether an output, or all that is made of it, has at most the weights' bytes."""
        if self._num_bytes(op.makes) <= self._num_bytes(self.roots[op.makes[0]]):
            return True
        readers = [self.ops[name] for made in op.makes for name in self.readers.get(made, ())]
        return all(self._of_weights(each) and self._is_small(each) for each in readers)

    def _record_homes(self, op: Op) -> None:
        for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=True):
            if name is not None:
                self.homes[name] = (op.stage, nd_sbp)

    def _move_home(self, op: Op) -> Op | None:
        homes = [self.homes[name] for name in op.inputs if name in self.homes]
        if len(homes) < len(op.inputs) or len({stage for stage, _ in homes}) > 1:
            return None
        at_home = replace(op, stage=homes[0][0]) if _makes_memory(op) else op
        if at_home.stage != homes[0][0]:
            return None  # a view goes where it is read
        reduces = 2 * self._num_bytes(op.makes) <= self._num_bytes(op.inputs)
        return self._sign(at_home, tuple(nd_sbp for _, nd_sbp in homes), partial=reduces)

    # ------------------------------------------------------------------ from readers to weights

    def follow(self, op: Op) -> None:
        """Give each layout in which readers need a view of a weight, or a widened gradient, a
        twin of its op.
        """
        op = self.ops[op.name]
        viewed = self._of_weights(op) and not _makes_memory(op)
        if not viewed and not self._widens(op):
            return
        if not viewed and self.strategy.reduce_in_fp32:
            self.ops[op.name] = self._cast_before_sum(op)
            return
        wanted: dict[tuple[tuple[NdSbp, ...], str], list[str]] = {}
        for output in op.makes:
            for reader in dict.fromkeys(self.readers.get(output, ())):
                wanted.setdefault(self._layout_for(op, output, self.ops[reader]), []).append(reader)
        for (outputs, phase), readers in wanted.items():
            if len(wanted) == 1:
                signed = self._sign(op, outputs=outputs) or op
                self.ops[op.name] = replace(signed, phase=phase)
            elif (outputs, phase) != (op.out_sbp, op.phase):
                self._add_twin(op, outputs, phase, readers)

    def _widens(self, op: Op) -> bool:
        if op.target != CAST or op.phase in (COUNT, FORWARD, UPDATE, WEIGHTS):
            return False
        (source,), (output,) = op.inputs, op.makes
        wider = self.tensors[output].dtype.itemsize > self.tensors[source].dtype.itemsize
        readers = [self.ops[name] for name in self.readers.get(output, ())]
        return wider and all(has(reader.target, Trait.SUM) for reader in readers)

    def _cast_before_sum(self, op: Op) -> Op:
        """Return the cast of a gradient in the layout in which the gradient is made."""
        maker = self.ops[self.base.producer[op.inputs[0]].name]
        nd_sbp = maker.sbp_of(op.inputs[0])
        return self._sign(op, inputs=(nd_sbp,), partial=True) or op

    def _layout_for(self, op: Op, output: str, reader: Op) -> tuple[tuple[NdSbp, ...], str]:
        """Return (SBPs of the outputs, phase) of the twin of an op that suits a reader of `output`
        best.
        """
        phase = WEIGHTS if reader.phase == WEIGHTS else op.phase
        forms = {nd for n, nd in zip(reader.inputs, reader.in_sbp, strict=True) if n == output}
        if len(op.outputs) == 1 and len(forms) == 1 and reader.stage == op.stage:
            (form,) = forms
            if self._sign(op, outputs=(form,)) is not None:
                return (form,), phase
        return op.out_sbp, phase

    def _add_twin(
        self, op: Op, outputs: tuple[NdSbp, ...], phase: str, readers: Sequence[str]
    ) -> None:
        signed = self._sign(op, outputs=outputs) or op
        mark = format_nd_sbp(outputs[0]) + ("" if phase == op.phase else f"/{phase}")
        names = {name: f"{name}~{mark}" for name in op.makes}
        self.tensors.update({n: replace(self.tensors[old], name=n) for old, n in names.items()})
        twin = replace(
            signed,
            name=f"{op.name}~{mark}",
            outputs=tuple(names.get(name or "") for name in op.outputs),
            phase=phase,
        )
        self.ops[twin.name] = twin
        self.twins.setdefault(op.name, []).append(twin.name)
        for name in op.inputs:
            self.readers[name].append(twin.name)
        for reader in readers:
            self.ops[reader] = rename_inputs(self.ops[reader], names)
            for old, new in names.items():
                if reader in self.readers.get(old, ()):
                    self.readers[old].remove(reader)
                    self.readers.setdefault(new, []).append(reader)

    # ------------------------------------------------------------------ signatures

    def _sign(
        self,
        op: Op,
        inputs: tuple[NdSbp, ...] | None = None,
        outputs: tuple[NdSbp, ...] | None = None,
        partial: bool = False,
    ) -> Op | None:
        """Return the op with rows of its table that have these nd-SBPs; None if an axis has no such
        row.

        Among several rows the one that the op has wins.  partial: other rows may leave partial
        sums.
        """
        grid = self.strategy.placements[op.stage].shape
        if not grid:
            return op

        def rows_on(
            axis: int, ins: Sequence[Shape], outs: Sequence[Shape | None]
        ) -> list[Signature]:
            now = Signature(_column(op.in_sbp, axis), _column(op.out_sbp, axis))
            legal = registry.signatures(op, ins, outs, grid[axis])
            return [
                row
                for row in sorted(legal, key=lambda row: row != now)
                if inputs is None or row.inputs == _column(inputs, axis)
                if outputs is None or row.outputs == _column(outputs, axis)
                if row == now or partial or not _reduces(row)
            ]

        shapes = [self.tensors[name].shape for name in op.inputs]
        made = [None if name is None else self.tensors[name].shape for name in op.outputs]
        for row in registry.lift(rows_on, shapes, made, grid):
            signed = NdSignature.of(row)
            return replace(op, in_sbp=signed.inputs, out_sbp=signed.outputs)
        return None

    # ------------------------------------------------------------------ the end

    def graph(self) -> LogicalGraph:
        """Return the graph: twins follow their originals, and ops that nobody reads are left
        out.
        """
        ops: list[Op] = []
        for op in self.base.ops:
            for name in (op.name, *self.twins.get(op.name, ())):
                here = self.ops[name]
                replaced = op.name in self.twins and name == op.name
                if not (replaced and not any(self.readers.get(n) for n in here.makes)):
                    ops.append(here)
        used = {n for op in ops for n in (*op.makes, *op.inputs)}
        sources = {v.tensor for v in self.base.variables} | {f.tensor for f in self.base.feeds}
        tensors: dict[str, LogicalTensor] = {
            n: tensor for n, tensor in self.tensors.items() if n in used or n in sources
        }
        return replace(self.base, ops=tuple(ops), tensors=tensors)


def _column(nd_sbps: Sequence[NdSbp], axis: int) -> tuple[Sbp, ...]:
    return tuple(nd_sbp[axis] for nd_sbp in nd_sbps)


def _reduces(row: Signature) -> bool:
    return bool(row.reduced) or any(isinstance(sbp, Partial) for sbp in row.outputs)


def _makes_memory(op: Op) -> bool:
    """Return False for views: what they show is written when the weight is."""
    return not is_engine_op(op.target) and not is_view(op.target)
