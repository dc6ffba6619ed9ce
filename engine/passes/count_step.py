"""count_step: staged -> trained, in part.  The denominator of a loss is counted over the whole
step.

The loss of a step is that of its whole batch.  A loss that is a mean over targets that are not
ignored, over a mask or over weights of classes divides by a number of which a micro-batch knows
only its own part, and the mean of such means is another number.  Two rules make the loss
independent of the number of micro-batches:

    a sum over the samples of batch fields and constants alone is a count.  It is summed over the
    micro-batches of the step before its first forward (phase count), and tensors made of counts are
    made of these sums, once a step (phase weights);
    where forward or backward reads such a value, it reads a micro-batch's share of it: the value
    times 1 / micro_batches to the power of its degree (1 for a sum, 0 for a mean or a comparison).

Then the loss of a micro-batch is what its samples add to the loss of the step, times micro_batches,
and the mean over micro-batches is the loss of the whole batch, wherever the loss is linear in the
quotient.  Where it is not, or where no rule here knows how a denominator is made, each micro-batch
keeps its own denominator, and a note says so.

count_kinds.py says what each tensor is, as the micro-batches see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flowrun.engine.ir.graph import (
    BACKWARD,
    COUNT,
    FORWARD,
    WEIGHTS,
    LogicalGraph,
    LogicalTensor,
    Op,
    Ref,
    rename_inputs,
)
from flowrun.engine.ir.op_info import LABELS, Trait
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow import ranges
from flowrun.engine.ops.flow.update import ACCUMULATE
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.nn import loss
from flowrun.engine.ops.traits import has, is_view
from flowrun.engine.passes.count_kinds import CONSTANT, COUNTED, UNKNOWN, learn_kinds, name_targets
from flowrun.engine.passes.count_targets import split_off_count
from flowrun.engine.strategy import Strategy

_LINEAR = name_targets("""
    add.Tensor sub.Tensor rsub.Scalar add.Scalar sub.Scalar mul.Tensor mul.Scalar div.Tensor
    div.Scalar neg.default sum.default sum.dim_IntList mean.default mean.dim expand.default
    permute.default transpose.int t.default clone.default detach.default alias.default
    _to_copy.default where.self masked_fill.Scalar masked_fill.Tensor select.int slice.Tensor
    cat.default stack.default squeeze.default squeeze.dim squeeze.dims unsqueeze.default mm.default
    mv.default dot.default bmm.default flip.default
""")


def count_step(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Sum the denominators of losses over the micro-batches of the step.

    Returns the graph itself if there are none, or only one micro-batch.
    """
    if strategy.micro_batches == 1 or strategy.mirrored or not strategy.counts_step:
        return graph
    return _Rewriting(_split_off_counts(graph), strategy.micro_batches).graph() or graph


def find_step_results(graph: LogicalGraph) -> frozenset[str]:
    """Return the names of the results that are made of what was counted over the step; all others
    are means of what micro-batches have.
    """
    reached: set[str] = set()
    for op in graph.ops:
        if op.phase == COUNT or not reached.isdisjoint(op.inputs):
            reached.update(op.makes)
    return frozenset(name for name, tensor in graph.results if tensor in reached)


def _split_off_counts(graph: LogicalGraph) -> LogicalGraph:
    """Count the weight of a loss's targets by an op of its own, which reads no logits."""
    ops: list[Op] = []
    for op in graph.ops:
        look_up = registry.info(op.target).looks_up
        labels = look_up if look_up and look_up.words == LABELS and op.phase == FORWARD else None
        if labels and op.outputs[1] is not None:
            given = registry.arguments_of(op)
            target, ignored = given[labels.ids], given[labels.ignored]
            if given["weight"] is None and isinstance(target, Ref):  # nothing is looked up
                maker = graph.producer.get(target.name)
                target = maker.args[0] if maker and maker.target == ranges.CHECK else target
            ops += split_off_count(graph, op, (target, given["weight"], ignored))
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


class _Rewriting:
    """The state of the rewriting: the kinds of tensors made of the batch alone, and the ops that
    count.
    """

    def __init__(self, graph: LogicalGraph, micro_batches: int) -> None:
        self.base = graph
        self.micro_batches = micro_batches
        self.tensors = dict(graph.tensors)
        self.known = learn_kinds(graph)
        self.count_ops: list[Op] = []  # phase count
        self.step_ops: list[Op] = []  # phase weights
        self.count_copies: dict[str, str] = {}  # tensor -> its copy in phase count
        self.step_values: dict[str, str] = {}  # tensor -> its value for the step
        self.notes: list[str] = []

    def graph(self) -> LogicalGraph | None:
        """Return the rewritten graph; None if no denominator is a count."""
        shares = {name: self._share(name) for name in self._values_to_share()}
        notes = (*self.base.notes, *self._collect_notes())
        if not shares:
            return replace(self.base, notes=notes) if self.notes else None
        ops = [op if op.target == ACCUMULATE else rename_inputs(op, shares) for op in self.base.ops]
        kept = self._drop_unread([*self.count_ops, *self.step_ops, *ops])
        return replace(self.base, ops=kept, tensors=self.tensors, notes=notes)

    def _drop_unread(self, ops: list[Op]) -> tuple[Op, ...]:
        """Return the ops without counts of a micro-batch that nobody reads any more."""
        read = {tensor for _, tensor in self.base.results}
        out: list[Op] = []
        for op in reversed(ops):
            if read.isdisjoint(op.makes) and self._is_known(op):
                for name in op.makes:
                    self.tensors.pop(name, None)
                continue
            read.update(op.inputs)
            out.append(op)
        return tuple(reversed(out))

    def _is_known(self, op: Op) -> bool:
        return bool(op.makes) and all(name in self.known for name in op.makes)

    # ------------------------------------------------------------------ who reads it

    def _values_to_share(self) -> list[str]:
        """Return values known once a step that are read with every micro-batch.

        Every reader in forward must pass them on linearly.
        """
        linear = self._linear()
        readers: dict[str, list[Op]] = {}
        for op in self.base.ops:
            if op.phase in (FORWARD, BACKWARD) and not has(op.target, Trait.SUM):
                for name in dict.fromkeys(op.inputs):
                    state = self.known.get(name)
                    if state and state.once and not self._is_known_once(op):
                        readers.setdefault(name, []).append(op)
        wanted = []
        for name, ops in readers.items():
            refused = [
                op for op in ops if op.phase == FORWARD and not self._may_read_share(op, linear)
            ]
            if not refused:
                wanted.append(name)
            elif any(op.target == "aten.div.Tensor" for op in refused):
                self._note(refused[0])
        return wanted

    def _is_known_once(self, op: Op) -> bool:
        return self._is_known(op) and all(self.known[name].once for name in op.makes)

    def _linear(self) -> frozenset[str]:
        """Return the tensors of forward in which all results are linear."""
        bad: set[str] = set()
        for op in reversed(self.base.ops):
            if op.phase != FORWARD or has(op.target, Trait.SUM):
                continue
            lost = not bad.isdisjoint(op.makes)
            for name in op.inputs:
                if lost or not self._is_linear(op, name):
                    bad.add(name)
        return frozenset(self.tensors) - bad

    def _is_linear(self, op: Op, name: str) -> bool:
        """Return whether the outputs of the op are linear in the tensor `name` that it reads."""
        if op.target not in _LINEAR and not is_view(op.target):
            return False
        if op.inputs.count(name) > 1 and op.target != "aten.add.Tensor":
            return False
        others = {"aten.div.Tensor": 1, "aten.where.self": 0, "aten.masked_fill.Scalar": 1}
        if op.target not in others:
            return True
        other = op.args[others[op.target]]
        return not isinstance(other, Ref) or other.name in self.known

    def _may_read_share(self, op: Op, linear: frozenset[str]) -> bool:
        """Return whether a reader of a value known once a step may read a share of it."""
        if self._is_known(op) and UNKNOWN in {self.known[name].kind for name in op.makes}:
            return False
        rest = [name for name in op.inputs if name not in self.known]
        return linear.issuperset(op.makes) and all(self._is_linear(op, name) for name in rest)

    def _note(self, op: Op) -> None:
        where = f"module {op.module}" if op.module not in ("", "loss") else "the loss"
        self.notes.append(
            f"{where} divides by a number that each micro-batch counts for itself, and the loss is"
            " not linear in the quotient: micro-batches are averaged as means there"
        )

    def _collect_notes(self) -> Iterator[str]:
        """Yield a note for each denominator that could not be counted."""
        for op in self.base.ops:
            if op.target == loss.COUNT and op.makes[0] not in self.known:
                self.notes.append(
                    "the targets of a loss are made by the model, and counted by each micro-batch:"
                    " micro-batches are averaged as means there"
                )
            if op.target == "aten.div.Tensor" and op.phase == FORWARD and op.module == "loss":
                divisor = op.args[1]
                state = self.known.get(divisor.name) if isinstance(divisor, Ref) else None
                one = state and self.tensors[divisor.name].num_elements == 1
                if one and state and state.kind == UNKNOWN and op.args[0].name not in self.known:
                    self.notes.append(
                        f"the loss divides by {divisor.name}, which cannot be counted over the"
                        " step: micro-batches are averaged as means there"
                    )
        yield from dict.fromkeys(self.notes)

    # ------------------------------------------------------------------ ops in their place

    def _share(self, name: str) -> str:
        """Return the tensor that a micro-batch reads in place of a value known once a step."""
        whole, degree = self._step(name), self.known[name].degree
        if not degree:
            return whole
        maker, own = self.base.producer[name], self.tensors[name].dtype
        dtype = own if own.is_floating_point else torch.float32
        share = self._add_step_op(
            maker,
            f"{name}/share",
            "aten.mul.Tensor",
            (Ref(whole), float(self.micro_batches) ** -degree),
            dtype,
        )
        wanted = self._reader_dtype(name)
        if own.is_floating_point or wanted == dtype:
            return share
        cast, kwargs = CAST, (("dtype", wanted),)
        return self._add_step_op(maker, f"{name}/share/narrow", cast, (Ref(share),), wanted, kwargs)

    def _reader_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that readers compute with an integer: the share must not widen what
        it divides.
        """
        outputs = {
            self.tensors[out].dtype
            for op in self.base.consumers[name]
            if not self._is_known_once(op)
            for out in op.makes
        }
        return outputs.pop() if len(outputs) == 1 else torch.float32

    def _step(self, name: str) -> str:
        """Return the tensor that holds the value of the step."""
        state = self.known[name]
        if state.kind == CONSTANT and name in self.base.variable_of:
            return name
        if name not in self.step_values:
            maker = self.base.producer[name]
            self.step_values[name] = (
                self._sum(name, maker) if state.kind == COUNTED else self._copy(name, maker)
            )
        return self.step_values[name]

    def _copy(self, name: str, maker: Op) -> str:
        """Repeat the op that makes a value, on values of the step."""
        read = {each: self._step(each) for each in maker.inputs}
        output = f"{name}/step"
        self.tensors[output] = replace(self.tensors[name], name=output)
        op = rename_inputs(maker, read)
        self.step_ops.append(replace(op, name=output, phase=WEIGHTS, outputs=(output,)))
        return output

    def _sum(self, name: str, maker: Op) -> str:
        """Sum a count over the micro-batches of the step."""
        output, like = f"{name}/step", self.tensors[name]
        self.tensors[output] = replace(like, name=output)
        counted = Ref(self._count(name))
        target, table = ACCUMULATE, None
        op = replace(maker, name=output, target=target, phase=COUNT, outputs=(output,), table=table)
        self.count_ops.append(replace(op, args=(counted,), kwargs=()))
        if self.known[name].degree:
            return output
        share = (Ref(output), 1.0 / self.micro_batches)
        return self._add_step_op(maker, f"{output}/mean", "aten.mul.Tensor", share, like.dtype)

    def _count(self, name: str) -> str:
        """Return the copy, in phase count, of a tensor that is made of the batch."""
        maker = self.base.producer.get(name)
        if maker is None:
            return name
        if name not in self.count_copies:
            op = rename_inputs(maker, {each: self._count(each) for each in maker.inputs})
            outputs = tuple(each and f"{each}/counted" for each in maker.outputs)
            for each in maker.makes:
                copy = self.count_copies[each] = f"{each}/counted"
                self.tensors[copy] = replace(self.tensors[each], name=copy)
            new = replace(op, name=f"{maker.name}/counted", phase=COUNT, outputs=outputs)
            self.count_ops.append(new)
        return self.count_copies[name]

    def _add_step_op(
        self,
        maker: Op,
        output: str,
        target: str,
        args: tuple[object, ...],
        dtype: torch.dtype,
        kwargs: tuple[tuple[str, object], ...] = (),
    ) -> str:
        """Append an op of the step with the stage and shape of `maker`'s output; return what it
        makes.
        """
        self.tensors[output] = LogicalTensor(output, self.tensors[maker.makes[0]].shape, dtype)
        op = replace(
            maker, name=output, target=target, phase=WEIGHTS, outputs=(output,), table=None
        )
        self.step_ops.append(replace(op, args=args, kwargs=kwargs))
        return output
