"""keep_narrow: staged -> staged.  Weights are kept in bf16, if `precision.param_dtype` asks for it.

The model computes as before: forward and backward read the weight through a widening cast, one for
each stage.  Two things make it free where the model computes in bf16.  A cast back to bf16, as
autocast has it, falls away, since both together change nothing.  A look-up reads the narrow table,
and its result is widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref, Variable, rename_inputs
from flowrun.engine.ops.flow.rounding import NARROW
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.strategy import Strategy

_LOOK_UP = "aten.embedding.default"
_TO_NARROW = (("dtype", NARROW),)


def keep_narrow(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Make the weights bf16, and widen them where they are read."""
    found = [v for v in graph.variables if _is_kept_narrow(graph, v, strategy)]
    if not found:
        return graph
    tensors = dict(graph.tensors)
    tensors.update((v.tensor, replace(tensors[v.tensor], dtype=NARROW)) for v in found)
    weights = {v.tensor for v in found}
    wide: dict[tuple[str, int], str] = {}  # (weight, stage) -> what its readers read there
    same: dict[str, str] = {}  # a cast that falls away -> the weight
    ops: list[Op] = []
    for old in graph.ops:
        op = rename_inputs(old, same)
        read = [name for name in dict.fromkeys(old.inputs) if name in weights]
        if read and op.target == CAST and op.kwargs == _TO_NARROW:
            same[op.makes[0]] = read[0]
            del tensors[op.makes[0]]
            continue
        if read and op.target == _LOOK_UP:
            ops.extend(_widen_after(op, tensors))
            continue
        names = {}
        for name in read:
            key = name, op.stage
            if key not in wide:
                wide[key] = _widen(name, op, tensors, ops)
            names[name] = wide[key]
        ops.append(rename_inputs(op, names))
    results = tuple((key, same.get(name, name)) for key, name in graph.results)
    return replace(graph, ops=tuple(ops), tensors=tensors, results=results)


def _is_kept_narrow(graph: LogicalGraph, variable: Variable, strategy: Strategy) -> bool:
    is_weight = variable.kind == "parameter" and strategy.kept.weights
    plain = graph.tensors[variable.tensor].dtype == torch.float32
    return is_weight and plain and strategy.kept.narrows(variable.name)


def _widen(name: str, reader: Op, tensors: dict[str, LogicalTensor], ops: list[Op]) -> str:
    """Add a cast in front of the first reader on a stage; return what it makes."""
    made = f"{name}/wide" if f"{name}/wide" not in tensors else f"{name}/wide@{reader.stage}"
    tensors[made] = replace(tensors[name], name=made, dtype=torch.float32)
    ops.append(_cast(reader, name, made))
    return made


def _widen_after(op: Op, tensors: dict[str, LogicalTensor]) -> Iterator[Op]:
    """Look up in the narrow table, then widen what was found."""
    (found,) = op.makes
    narrow = f"{found}/narrow"
    tensors[narrow] = replace(tensors[found], name=narrow, dtype=NARROW)
    yield replace(op, name=narrow, outputs=(narrow,))
    yield _cast(op, narrow, found)


def _cast(like: Op, read: str, made: str) -> Op:
    kwargs = (("dtype", torch.float32),)
    return replace(
        like, name=made, target=CAST, args=(Ref(read),), kwargs=kwargs, outputs=(made,), table=None
    )
