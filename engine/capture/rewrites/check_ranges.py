"""check_ranges: what is looked up in a table is checked first; behind simplify.py.

A label or id that is out of range is an error in torch.  Here it is one in every layout, and says
which field and sample it is of (rank/readers.py finds those).  What the model makes itself
(routing, argmax) is in range by the way it is made, and checked only where split tables would hide
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flowrun.engine.ir.graph import FORWARD, LogicalGraph, Op, Ref
from flowrun.engine.ops.flow.ranges import CHECK
from flowrun.engine.ops.registry import arguments_of, info


def check_ranges(graph: LogicalGraph) -> LogicalGraph:
    """A check in front of every look-up in forward whose ids come with the batch."""
    fields = _fields(graph)
    tensors, ops = dict(graph.tensors), list[Op]()
    checked: dict[tuple[object, ...], str] = {}  # (ids, size, …) -> the same, checked
    for op in graph.ops:
        for at, ids, rest in _asked(graph, op, fields):
            key = (ids, *rest)
            if key not in checked:
                checked[key] = _new(f"{ids}/checked", tensors)
                made = checked[key]
                tensors[made] = replace(tensors[ids], name=made)
                args = (Ref(ids), *rest)
                ops.append(
                    replace(
                        op,
                        name=made,
                        target=CHECK,
                        table=None,
                        args=args,
                        kwargs=(),
                        outputs=(made,),
                    )
                )
            args = tuple(Ref(checked[key]) if k == at else arg for k, arg in enumerate(op.args))
            op = replace(op, args=args)
        ops.append(op)
    return replace(graph, ops=tuple(ops), tensors=tensors) if checked else graph


def _asked(
    graph: LogicalGraph, op: Op, fields: Mapping[str, frozenset[str]]
) -> Iterator[tuple[int, str, tuple[object, ...]]]:
    """(place among the arguments, ids, the other arguments of a check)."""
    look_up = info(op.target).looks_up
    if look_up is None or op.phase != FORWARD:
        return
    given = arguments_of(op)
    ids, table = given[look_up.ids], given[look_up.table]
    at = list(given).index(look_up.ids)
    of = fields.get(ids.name)
    if at >= len(op.args) or not (of or (look_up.by_mask and of is None)):
        return  # constants are in range, as capture has run them
    shape, dim = graph.tensors[table.name].shape, look_up.dim
    at_dim = given[dim] if isinstance(dim, str) else min(dim, len(shape) - 1)
    if shape:
        ignored = given[look_up.ignored] if look_up.ignored else None
        yield at, ids.name, (shape[at_dim], ignored, False, look_up.words, tuple(sorted(of or ())))


def _fields(graph: LogicalGraph) -> dict[str, frozenset[str]]:
    """Tensor that is made of the batch and constants alone -> its fields."""
    found = {f.tensor: frozenset((f.field,)) for f in graph.feeds if not f.is_own}
    for op in graph.ops:
        if all(name in found for name in op.inputs):
            fields = frozenset().union(*(found[name] for name in op.inputs))
            found.update(dict.fromkeys(op.makes, fields))
    return found


def _new(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "'"
    return name
