"""kept_logits: cross entropy computed from logits, not log-probabilities; a part of simplify.py.

torch computes log-probabilities of all classes and looks up those of the targets; backward computes
their gradient, which is zero except at the targets, and from both the gradient of the logits.  A
row needs only its logits and one number more (ops/nn/cross_entropy.py).  Narrow logits that a loss
widens are read as they are, and their gradient is written as narrow as its cast would be: nothing
as large as the logits is ever in fp32 (as in FlashAttention's cross entropy, which llm-foundry
uses).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flowrun.engine.ir.graph import LogicalGraph, Op, Ref
from flowrun.engine.ir.signature import bind
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import MEAN, NLL, NLL_BACKWARD
from flowrun.engine.ops.nn.softmax import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD


def make_loss_of_logits(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph with cross entropy of logits where nothing else reads log-probabilities."""
    tensors = dict(graph.tensors)
    written: dict[str, tuple[Op, ...]] = {}  # name of an op -> the ops in its place
    for op in graph.ops:
        loss = _Loss.at(graph, op) if op.target == LOG_SOFTMAX else None
        if loss is not None:
            log_p = tensors[op.makes[0]]
            tensors[loss.lse] = replace(log_p, name=loss.lse, shape=(*log_p.shape[:1], 1))
            written |= dict(loss.replacements())
    ops = tuple(new for op in graph.ops for new in written.get(op.name, (op,)))
    return replace(graph, ops=ops, tensors=tensors)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A log_softmax and all readers of its result.

    logits: what it is of.
    forward: the nll losses.
    backward: pairs of ops: the gradient of log-probabilities, then that of the logits.
    casts: of gradients, which are computed with them.
    """

    log_softmax: Op
    logits: str
    forward: tuple[Op, ...]
    backward: tuple[tuple[Op, Op], ...]
    casts: tuple[Op, ...] = ()

    @staticmethod
    def at(graph: LogicalGraph, op: Op) -> _Loss | None:
        """Return the loss at a log_softmax; None if it has other readers or is not a matrix."""
        (log_p,), shape = op.makes, graph.tensors[op.makes[0]].shape
        readers = graph.consumers.get(log_p, ())
        casts = graph.tensors[op.inputs[0]].dtype != graph.tensors[log_p].dtype
        reported = log_p in {name for _, name in graph.results}
        if len(shape) != 2 or op.args[1] % 2 != 1 or casts or reported:
            return None
        forward = tuple(r for r in readers if _reads(r, NLL, "self", log_p))
        backward = tuple(_backward_pairs(graph, log_p))
        known = {r.name for r in forward} | {r.name for pair in backward for r in pair}
        if not forward or not known.issuperset(r.name for r in readers):
            return None
        return _Loss(op, op.inputs[0], forward, backward).narrow(graph)

    def narrow(self, graph: LogicalGraph) -> _Loss:
        """Return the loss of the logits before they were widened, if their gradients are narrowed
        and not read otherwise; else the loss.
        """
        narrow = _before_cast(graph, self.logits)
        readers = [graph.consumers.get(after.makes[0], ()) for _, after in self.backward]
        casts = [read[0] for read in readers if len(read) == 1 and read[0].target == CAST]
        dtypes = {graph.tensors[cast.makes[0]].dtype for cast in casts}
        if len(casts) < len(readers) or dtypes - {graph.tensors[narrow].dtype}:
            return self
        pairs = zip(self.backward, casts, strict=True)
        backward = tuple(
            (nll, replace(after, outputs=cast.outputs)) for (nll, after), cast in pairs
        )
        return _Loss(self.log_softmax, narrow, self.forward, backward, tuple(casts))

    @property
    def lse(self) -> str:
        """The name of the log of the sum of exponentials of each row."""
        return f"{self.log_softmax.name}_lse"

    def replacements(self) -> Iterator[tuple[str, tuple[Op, ...]]]:
        """Yield (name of an op, the ops in its place)."""
        op, widens = self.log_softmax, self.logits != self.log_softmax.inputs[0]
        target = cross_entropy.LOG_SUM_EXP if widens else "aten.logsumexp.default"
        of_rows = (Ref(self.logits), (1,), True, *([torch.float32] if widens else []))
        lse = replace(op, name=self.lse, target=target, args=of_rows, outputs=(self.lse,))
        yield op.name, (lse,)
        yield from ((cast.name, ()) for cast in self.casts)
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
        others = (given[name] for name in ("target", "weight", "reduction", "ignore_index"))
        return (Ref(self.logits), Ref(self.lse), *others)


def _backward_pairs(graph: LogicalGraph, log_p: str) -> Iterator[tuple[Op, Op]]:
    """Yield (nll, log_softmax) of backward where only the latter reads what the former makes."""
    for nll in graph.consumers.get(log_p, ()):
        if not _reads(nll, NLL_BACKWARD, "self", log_p):
            continue
        (grad,) = nll.makes
        for after in graph.consumers.get(grad, ()):
            if (
                graph.consumers[grad] == (after,)
                and _reads(after, LOG_SOFTMAX_BACKWARD, "grad_output", grad)
                and _reads(after, LOG_SOFTMAX_BACKWARD, "output", log_p)
                and graph.tensors[after.makes[0]].dtype == graph.tensors[log_p].dtype
            ):
                yield nll, after


def _reads(op: Op, target: str, argument: str, name: str) -> bool:
    """Return whether an op of this target reads the tensor as this argument, and only there."""
    return op.target == target and bind(op)[argument] == Ref(name) and op.inputs.count(name) == 1


def _before_cast(graph: LogicalGraph, name: str) -> str:
    """Return the tensor that another is a cast of to a wider dtype, else that tensor."""
    maker = graph.producer.get(name)
    if maker is None or maker.target != CAST:
        return name
    (read,) = maker.inputs
    before, after = graph.tensors[read].dtype, graph.tensors[name].dtype
    wider = before.is_floating_point and before.itemsize < after.itemsize
    return read if wider and [k for k, _ in maker.kwargs] == ["dtype"] else name
