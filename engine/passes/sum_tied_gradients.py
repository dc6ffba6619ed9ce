"""sum_tied_gradients: the gradient of a weight that several stages read is summed once a step.

A tied weight has one home, the first stage that reads it, with its optimizer states. The others get
a copy once a step, accumulate their own part of the gradient, and send the sum home once a step.
That is 2T bytes a step for a weight of T bytes, as with two homes that all-reduce their gradients
(Megatron-LM), but without a second set of optimizer states and a second update; the norm of all
gradients counts it once, and a checkpoint has it once.

Autograd adds the parts with every micro-batch. This pass splits its sum where the addends are made
on different stages: `results` then names the gradient once for each stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph, Op, Ref, rename_inputs
from flowrun.engine.strategy import Strategy

# Ops that may follow the sum: f(a + b) = f(a) + f(b), one tensor in, one out.
_LINEAR = tuple(
    f"aten.{name}"
    for name in (
        *("t.default", "transpose.int", "permute.default", "view.default", "_unsafe_view.default"),
        *("clone.default", "_to_copy.default", "expand.default"),
    )
)


def sum_tied_gradients(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Split the gradient of a tied weight into one part for each stage; the home's part comes
    first.
    """
    if not any(op.stage for op in graph.ops):
        return graph
    splitter = _Splitter(graph)
    results: list[tuple[str, str]] = []
    for name, tensor in graph.results:
        parts = splitter.parts(tensor) if name.startswith("grad/") else [tensor]
        results += [(name, part) for part in parts]
    gone = splitter.gone
    ops: list[Op] = []
    for op in graph.ops:
        ops += splitter.instead.get(op.name, [] if op.name in gone else [op])
    return replace(graph, ops=tuple(ops), tensors=splitter.tensors, results=tuple(results))


class _Splitter:
    """The sums that are split.  gone: ops that are removed.  instead: op -> the ops that replace
    it.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        self.reported = Counter(tensor for _, tensor in graph.results)
        self.tensors = dict(graph.tensors)
        self.gone: set[str] = set()
        self.instead: dict[str, list[Op]] = {}

    def parts(self, gradient: str) -> list[str]:
        """Return the names of the gradient's parts, one for each stage, in order of stages."""
        tail = list(self._tail(gradient))
        top = tail[-1].inputs[0] if tail else gradient
        sums = list(self._sums(top))
        inner = {op.makes[0] for op in sums}
        addends = [name for op in sums for name in op.inputs if name not in inner]
        by_stage: dict[int, list[str]] = {}
        for name in addends:
            source = self.graph.producer.get(name)
            by_stage.setdefault(source.stage if source else 0, []).append(name)
        if len(by_stage) < 2:
            return [gradient]
        self.gone.update(op.name for op in (*sums, *tail))
        ops: list[Op] = []
        parts = [
            self._part(gradient, stage, by_stage[stage], sums[0], tail, ops)
            for stage in sorted(by_stage)
        ]
        self.instead[(tail or sums)[0].name] = ops
        return parts

    def _part(
        self, gradient: str, stage: int, addends: list[str], like: Op, tail: list[Op], ops: list[Op]
    ) -> str:
        """Append ops that sum the addends of one stage and apply the ops that follow the whole
        sum.
        """
        here, *others = addends
        for k, other in enumerate(others):
            name = self._add_tensor(f"{like.name}@{stage}.{k}", like.makes[0])
            ops.append(
                replace(like, name=name, args=(Ref(here), Ref(other)), outputs=(name,), stage=stage)
            )
            here = name
        for op in reversed(tail):
            name = self._add_tensor(f"{op.name}@{stage}", op.makes[0])
            op = rename_inputs(op, {op.inputs[0]: here})
            module = self.graph.producer[addends[0]].module
            ops.append(replace(op, name=name, outputs=(name,), stage=stage, module=module))
            here = name
        return here

    def _add_tensor(self, name: str, like: str) -> str:
        self.tensors[name] = replace(self.graph.tensors[like], name=name)
        return name

    def _alone(self, tensor: str) -> Op | None:
        """Return the op that makes a tensor if exactly one op or result reads it."""
        readers = self.graph.consumers.get(tensor, ())
        return (
            self.graph.producer.get(tensor) if len(readers) + self.reported[tensor] == 1 else None
        )

    def _tail(self, gradient: str) -> Iterator[Op]:
        """Yield the linear ops between the sum and the gradient, last first."""
        op = self._alone(gradient)
        while op is not None and op.target in _LINEAR:
            yield op
            op = self._alone(op.inputs[0])

    def _sums(self, tensor: str) -> Iterator[Op]:
        """Yield the additions that make a tensor, last first."""
        op = self._alone(tensor)
        if op is None or op.target != "aten.add.Tensor" or op.kwargs:
            return
        shape = self.graph.tensors[tensor].shape
        two = len({*op.inputs}) == len(op.inputs) == 2
        if two and all(self.graph.tensors[name].shape == shape for name in op.inputs):
            yield op
            for name in op.inputs:
                yield from self._sums(name)
