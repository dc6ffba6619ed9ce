"""check_ranges: labels and ids are checked before they are looked up; runs after simplify.py.

A label or id that is out of range is an error in torch.  So it is here in every layout, and the
error names field and sample (rank/readers.py finds them).  Indices that the model computes itself
(routing, argmax) are in range by construction; they are checked only where a split table would hide
an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import FORWARD, LogicalGraph, Op, Ref
from flowrun.engine.ops.flow.ranges import CHECK
from flowrun.engine.ops.registry import arguments_of, info

_ADD = "aten.add.Tensor"
_RESHAPED = [
    f"aten.{name}.default" for name in ("_to_copy", "alias", "expand", "unsqueeze", "view")
]


def check_ranges(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph with a check before look-ups in forward whose ids come from the batch."""
    fields = _fields(graph)
    tensors, ops = dict(graph.tensors), list[Op]()
    checked: dict[tuple[object, ...], str] = {}  # (ids, size, …) -> the same, checked
    for op in graph.ops:
        for at, ids, rest in _needed_checks(graph, op, fields):
            key = (ids, *rest)
            if key not in checked:
                output = checked[key] = _new(f"{ids}/checked", tensors)
                tensors[output] = replace(tensors[ids], name=output)
                check = replace(op, name=output, target=CHECK, args=(Ref(ids), *rest), kwargs=())
                ops.append(replace(check, outputs=(output,)))
            args = tuple(Ref(checked[key]) if k == at else arg for k, arg in enumerate(op.args))
            op = replace(op, args=args)
        ops.append(op)
    return replace(graph, ops=tuple(ops), tensors=tensors) if checked else graph


def _needed_checks(
    graph: LogicalGraph, op: Op, fields: Mapping[str, frozenset[str]]
) -> Iterator[tuple[int, str, tuple[object, ...]]]:
    """Yield (position of the ids among the arguments, ids, other arguments of a check)."""
    look_up = info(op.target).looks_up
    if look_up is None or op.phase != FORWARD:
        return
    given = arguments_of(op)
    ids, table = given[look_up.ids], given[look_up.table]
    at = list(given).index(look_up.ids)
    of = fields.get(ids.name)
    shape, dim = graph.tensors[table.name].shape, look_up.dim
    at_dim = given[dim] if isinstance(dim, str) else min(dim, len(shape) - 1)
    if shape and (last := _last_position(graph, ids.name)) >= shape[at_dim]:
        raise RecipeError(
            "model",
            f"forward looks up position {last} in {table.name}, which has {shape[at_dim]}: samples "
            "are longer than the model's positions.",
            f"Let samples be {shape[at_dim]} long (data.length of text), or give the model more "
            "positions (model.context of a GPT).",
        )
    if at >= len(op.args) or not (of or (look_up.by_mask and of is None)):
        return  # other constants are in range: capture would have failed
    if shape:
        ignored = given[look_up.ignored] if look_up.ignored else None
        yield at, ids.name, (shape[at_dim], ignored, False, look_up.words, tuple(sorted(of or ())))


def _last_position(graph: LogicalGraph, ids: str) -> int:
    """Return the last of ids that count from a number; -1: they are others."""
    offset = 0
    while (op := graph.producer.get(ids)) and op.target in (*_RESHAPED, _ADD):
        if op.target == _ADD:
            if op.kwargs or not isinstance(op.args[1], int):
                return -1
            offset += op.args[1]
        ids = op.inputs[0]
    counts = op is not None and op.target.startswith("aten.arange.")
    numbers = [arg for arg in op.args if isinstance(arg, int)] if op and counts else []
    return max(range(*numbers), default=-1) + offset if numbers else -1


def _fields(graph: LogicalGraph) -> dict[str, frozenset[str]]:
    """Return tensor -> fields, for tensors computed from nothing but the batch and constants."""
    fields_of = {f.tensor: frozenset((f.field,)) for f in graph.feeds if not f.is_own}
    for op in graph.ops:
        if all(name in fields_of for name in op.inputs):
            fields = frozenset().union(*(fields_of[name] for name in op.inputs))
            fields_of.update(dict.fromkeys(op.makes, fields))
    return fields_of


def _new(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "'"
    return name
