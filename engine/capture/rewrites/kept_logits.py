"""losses: cross entropy of logits instead of their log-probabilities; part of simplify.py.

Torch makes log-probabilities of all classes and looks up those of the targets; backward makes a
gradient of them, zero but at the targets, and of both that of the logits.  All that is needed of a
row beside its logits is one number (ops/nn/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flowrun.engine.ir.graph import LogicalGraph, Op, Ref
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import MEAN
from flowrun.engine.ops.signature import bind

_LOG_SOFTMAX = "aten._log_softmax.default"
_LOG_SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"
_NLL, _NLL_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"


def keep_logits(graph: LogicalGraph) -> LogicalGraph:
    """Where only losses, and what their gradients go through, read log-probabilities."""
    tensors = dict(graph.tensors)
    written: dict[str, tuple[Op, ...]] = {}  # an op -> those in its place
    for op in graph.ops:
        found = _Loss.at(graph, op) if op.target == _LOG_SOFTMAX else None
        if found is not None:
            tensors[found.lse] = replace(
                tensors[op.makes[0]], name=found.lse, shape=(*tensors[op.makes[0]].shape[:1], 1)
            )
            written |= found.in_place()
    ops = tuple(new for op in graph.ops for new in written.get(op.name, (op,)))
    return replace(graph, ops=ops, tensors=tensors)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A log_softmax and all that reads what it makes.

    logits: as they were before they were made as wide as log-probabilities.  backward: the gradient
    of what nll looks up, and that of the logits.
    """

    log_softmax: Op
    logits: str
    forward: tuple[Op, ...]
    backward: tuple[tuple[Op, Op], ...]

    @staticmethod
    def at(graph: LogicalGraph, op: Op) -> _Loss | None:
        """None where log-probabilities are of other use too, or rows have other dims."""
        (log_p,), shape = op.makes, graph.tensors[op.makes[0]].shape
        readers = graph.consumers.get(log_p, ())
        casts = graph.tensors[op.inputs[0]].dtype != graph.tensors[log_p].dtype
        reported = log_p in {name for _, name in graph.results}
        if len(shape) != 2 or op.args[1] % 2 != 1 or casts or reported:
            return None
        forward = tuple(r for r in readers if _reads(r, _NLL, "self", log_p))
        backward = tuple(
            (nll, after)
            for nll in readers
            if _reads(nll, _NLL_BACKWARD, "self", log_p)
            for after in graph.consumers.get(nll.makes[0], ())
            if _reads(after, _LOG_SOFTMAX_BACKWARD, "grad_output", nll.makes[0])
            and _reads(after, _LOG_SOFTMAX_BACKWARD, "output", log_p)
            and graph.consumers[nll.makes[0]] == (after,)
            and graph.tensors[after.makes[0]].dtype == graph.tensors[log_p].dtype
        )
        known = {r.name for r in forward} | {r.name for pair in backward for r in pair}
        if not forward or not known.issuperset(r.name for r in readers):
            return None
        return _Loss(op, _before_cast(graph, op.inputs[0]), forward, backward)

    @property
    def lse(self) -> str:
        """The name of what is kept of a row."""
        return f"{self.log_softmax.name}_lse"

    def in_place(self) -> Mapping[str, tuple[Op, ...]]:
        """An op -> those in its place."""
        return dict(self._written())

    def _written(self) -> Iterator[tuple[str, tuple[Op, ...]]]:
        op = self.log_softmax
        target, of_rows = "aten.logsumexp.default", (op.args[0], (1,), True)
        yield (
            op.name,
            (replace(op, name=self.lse, target=target, args=of_rows, outputs=(self.lse,)),),
        )
        for nll in self.forward:
            target, args = cross_entropy.FORWARD, self._given(nll)
            yield nll.name, (replace(nll, target=target, args=args, kwargs=()),)
        for nll, after in self.backward:
            given = bind(nll)
            total = given["total_weight"] if given["reduction"] == MEAN else None
            args = (given["grad_output"], *self._given(nll), total, None)
            yield nll.name, ()
            yield after.name, (replace(after, target=cross_entropy.BACKWARD, args=args, kwargs=()),)

    def _given(self, nll: Op) -> tuple[object, ...]:
        given = bind(nll)
        beside = (given[name] for name in ("target", "weight", "reduction", "ignore_index"))
        return (Ref(self.logits), Ref(self.lse), *beside)


def _reads(op: Op, target: str, argument: str, name: str) -> bool:
    """True if the op is of this target and the tensor is that argument, and no other."""
    return op.target == target and bind(op)[argument] == Ref(name) and op.inputs.count(name) == 1


def _before_cast(graph: LogicalGraph, name: str) -> str:
    """What a tensor is a wider copy of; else the tensor."""
    made = graph.producer.get(name)
    if made is None or made.target != "aten._to_copy.default":
        return name
    (read,) = made.inputs
    before, after = graph.tensors[read].dtype, graph.tensors[name].dtype
    wider = before.is_floating_point and before.itemsize < after.itemsize
    return read if wider and [k for k, _ in made.kwargs] == ["dtype"] else name
