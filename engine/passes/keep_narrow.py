"""keep_narrow: staged -> staged.  Weights are kept in bf16, if `precision.param_dtype` asks for it.

The model computes as before: forward and backward read the weight through a widening cast, one for
each stage.  Two things make it free where the model computes in bf16.  A cast back to bf16, as
autocast has it, falls away, since both together change nothing.  A look-up reads the narrow table,
and its result is widened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from flowrun.engine.ir.graph import LogicalGraph, Op, Ref, Variable, rename_inputs
from flowrun.engine.ops.flow.rounding import NARROW
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.strategy import Strategy

_LOOK_UP = "aten.embedding.default"
_TO_NARROW = (("dtype", NARROW),)


def keep_narrow(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Make the weights bf16, and widen them where they are read."""
    narrowed = {v.tensor for v in graph.variables if _is_kept_narrow(graph, v, strategy)}
    if not narrowed:
        return graph
    widener = _Widener(graph, narrowed)
    ops = tuple(new for op in graph.ops for new in widener.rewrite(op))
    results = tuple((key, widener.same.get(name, name)) for key, name in graph.results)
    return replace(graph, ops=ops, tensors=widener.tensors, results=results)


class _Widener:
    """The tensors as weights become narrow.

    wide: (weight, stage) -> what its readers read there.  same: a cast that falls away -> the
    weight.
    """

    def __init__(self, graph: LogicalGraph, weights: Collection[str]) -> None:
        self.weights = weights
        self.tensors = dict(graph.tensors)
        self.tensors.update((n, replace(self.tensors[n], dtype=NARROW)) for n in weights)
        self.wide: dict[tuple[str, int], str] = {}
        self.same: dict[str, str] = {}

    def rewrite(self, old: Op) -> Iterator[Op]:
        """Yield the op on wide weights, after the casts that it is the first to need."""
        op = rename_inputs(old, self.same)
        read = [name for name in dict.fromkeys(old.inputs) if name in self.weights]
        if read and op.target == CAST and op.kwargs == _TO_NARROW:
            self.same[op.makes[0]] = read[0]
            del self.tensors[op.makes[0]]
        elif read and op.target == _LOOK_UP:
            yield from self._widen_after(op)
        else:
            for name in read:
                if (name, op.stage) not in self.wide:
                    yield self._widen(name, op)
            yield rename_inputs(op, {name: self.wide[name, op.stage] for name in read})

    def _widen(self, name: str, reader: Op) -> Op:
        """Return a cast for the readers on a stage."""
        first = f"{name}/wide"
        output = first if first not in self.tensors else f"{first}@{reader.stage}"
        self.tensors[output] = replace(self.tensors[name], name=output, dtype=torch.float32)
        self.wide[name, reader.stage] = output
        return _cast(reader, name, output)

    def _widen_after(self, op: Op) -> Iterator[Op]:
        """Look up in the narrow table, then widen the rows."""
        (rows,) = op.makes
        narrow = f"{rows}/narrow"
        self.tensors[narrow] = replace(self.tensors[rows], name=narrow, dtype=NARROW)
        yield replace(op, name=narrow, outputs=(narrow,))
        yield _cast(op, narrow, rows)


def _is_kept_narrow(graph: LogicalGraph, variable: Variable, strategy: Strategy) -> bool:
    is_weight = variable.kind == "parameter" and strategy.kept.weights
    plain = graph.tensors[variable.tensor].dtype == torch.float32
    return is_weight and plain and strategy.kept.narrows(variable.name)


def _cast(like: Op, read: str, output: str) -> Op:
    return replace(
        like,
        name=output,
        target=CAST,
        args=(Ref(read),),
        kwargs=(("dtype", torch.float32),),
        outputs=(output,),
        table=None,
    )
