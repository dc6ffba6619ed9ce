"""simplify: a captured graph -> a smaller graph of the same values, by pure rewrites.

Assignments under masks become torch.where (masked_writes.py), mean losses become sum / count, cross
entropies are computed from logits (kept_logits.py), double transposes and idle views are removed,
products keep their batch dims (batched.py), duplicates are merged, and dead ops dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowrun.engine.capture.rewrites.batched import keep_batches
from flowrun.engine.capture.rewrites.kept_logits import make_loss_of_logits
from flowrun.engine.capture.rewrites.masked_writes import choose_under_masks
from flowrun.engine.ir.graph import LogicalGraph, Op, Ref, rename_inputs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.nn.loss import NLL, NLL_2D
from flowrun.engine.ops.traits import has


def simplify(graph: LogicalGraph, *, keep_logits: bool = True) -> LogicalGraph:
    """Apply all rewrites to the graph, in order.

    keep_logits: as in capture.Task.
    """
    rewrites = (
        choose_under_masks,
        _split_mean_losses,
        *((make_loss_of_logits,) if keep_logits else ()),
        _fill_by_views,
        _drop_clones,
        _forget_running_statistics,
        keep_batches,
        _drop_double_transposes,
        _merge_duplicates,
        _unbatch_indices,
        drop_dead,
    )
    for rewrite in rewrites:
        graph = rewrite(graph)
    return graph


def _split_mean_losses(graph: LogicalGraph) -> LogicalGraph:
    """Split mean losses into sum / count: over a split batch these are partial, a mean is not."""
    ops: list[Op] = []
    tensors = dict(graph.tensors)
    for op in graph.ops:
        if op.target not in (NLL, NLL_2D) or op.args[3] != 1:
            ops.append(op)
            continue
        loss, count = op.outputs[0], op.outputs[1] or f"{op.name}_count"
        total, mean = f"{op.name}_sum", f"{op.name}_mean"
        tensors |= {name: replace(tensors[str(loss)], name=name) for name in (total, count)}
        ops.append(replace(op, args=(*op.args[:3], 2, *op.args[4:]), outputs=(total, count)))
        args = (Ref(total), Ref(count))
        ops.append(replace(op, name=mean, target="aten.div.Tensor", args=args, outputs=(loss,)))
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _forget_running_statistics(graph: LogicalGraph) -> LogicalGraph:
    """Remove running statistics, arguments 3 and 4, from backward of a norm in training (7)."""
    ops = list(graph.ops)
    for k, op in enumerate(ops):
        if op.target == "aten.native_batch_norm_backward.default" and op.args[7]:
            ops[k] = replace(op, args=(*op.args[:3], None, None, *op.args[5:]))
    return replace(graph, ops=tuple(ops))


_INSTEAD = {
    "aten._conj.default": "aten._conj_physical.default",  # ranks hold values, not lazy conjugates
    "aten._neg_view.default": "aten.neg.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.empty.memory_format": "aten.zeros.default",
}


def _fill_by_views(graph: LogicalGraph) -> LogicalGraph:
    """Replace writes of whole tensors by views of what is written.

    Uninitialised memory becomes zeros, and lazy conjugates and negatives are computed.
    """
    ops: list[Op] = []
    for op in graph.ops:
        if op.target in ("aten.copy.default", "aten.fill.Tensor"):
            output, source = graph.tensors[op.makes[0]], graph.tensors[op.inputs[1]]
            if output.dtype == source.dtype:
                args = (Ref(source.name), output.shape)
                op = replace(op, target="aten.expand.default", args=args, kwargs=())
        elif op.target in _INSTEAD:
            op = replace(op, target=_INSTEAD[op.target])
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _with_ops(graph: LogicalGraph, ops: list[Op], names: Mapping[str, str]) -> LogicalGraph:
    results = tuple((key, names.get(tensor, tensor)) for key, tensor in graph.results)
    return replace(graph, ops=tuple(ops), results=results)


def _drop_clones(graph: LogicalGraph) -> LogicalGraph:
    """Remove copies in the memory format of their input, such as those of dropout at p = 0.

    The copy of an expanded tensor stays, as a later view needs memory without overlaps.
    """
    names: dict[str, str] = {}
    ops: list[Op] = []
    for old in graph.ops:
        op = rename_inputs(old, names)
        if op.target == "aten.clone.default" and not op.kwargs:
            maker = graph.producer.get(op.inputs[0])
            if maker is None or not maker.target.startswith("aten.expand"):
                names[op.makes[0]] = op.inputs[0]
                continue
        ops.append(op)
    return _with_ops(graph, ops, names)


def _drop_double_transposes(graph: LogicalGraph) -> LogicalGraph:
    """Replace t(t(x)) by x and a view of a view by one view; remove views that keep the shape."""
    names: dict[str, str] = {}
    source: dict[str, str] = {}  # t's output -> its input
    # (module, phase, output of a view) -> its source; the output of a module keeps its shape
    viewed: dict[tuple[str, str, str], str] = {}
    ops: list[Op] = []
    for old in graph.ops:
        op = rename_inputs(old, names)
        if op.target == "aten.t.default":
            (inner,) = op.inputs
            if inner in source:
                names[op.makes[0]] = source[inner]
                continue
            source[op.makes[0]] = inner
        elif has(op.target, Trait.RESHAPE):
            output = op.makes[0]
            inner = viewed.get((op.module, op.phase, op.inputs[0]), op.inputs[0])
            shape = graph.tensors[output].shape
            if graph.tensors[inner].shape == shape:
                names[output] = inner
                continue
            viewed[op.module, op.phase, output] = inner
            op = replace(op, target="aten.view.default", args=(Ref(inner), shape))
        ops.append(op)
    return _with_ops(graph, ops, names)


def _merge_duplicates(graph: LogicalGraph) -> LogicalGraph:
    """Merge common subexpressions of a phase; those of weights alone over all phases.

    Autocast casts a weight at each use.  No two random ops have one stream, so none are merged.
    """
    of_weights = graph.of_weights
    names: dict[str, str] = {}
    seen: dict[object, Op] = {}
    ops: list[Op] = []
    for old in graph.ops:
        op = rename_inputs(old, names)
        phase = "" if of_weights.issuperset(op.makes) else op.phase
        key = (op.target, repr(op.args), repr(op.kwargs), phase)
        twin = seen.get(key)
        pairs = [*zip(twin.outputs, op.outputs, strict=True)] if twin else []
        if twin and all(a or not b for a, b in pairs):
            names.update({b: a for a, b in pairs if a and b})
            continue
        seen[key] = op
        ops.append(op)
    return _with_ops(graph, ops, names)


def _unbatch_indices(graph: LogicalGraph) -> LogicalGraph:
    """Replace x[arange, at], which torch.vmap writes, by x[:, at]: samples stay independent."""
    ops: list[Op] = []
    tensors = dict(graph.tensors)
    for op in graph.ops:
        which: tuple[Any, ...] = op.args[1] if op.target == "aten.index.Tensor" else ()
        if len(which) == 2 and None not in which and _is_count(graph, *op.inputs[:2]):
            at, flat = which[1], f"{op.name}_at"
            one, *shape = graph.tensors[at.name].shape
            if one == 1 and len(shape) == len(graph.tensors[op.makes[0]].shape) - 1:
                tensors[flat] = replace(tensors[at.name], name=flat, shape=tuple(shape))
                view = replace(op, name=flat, target="aten.view.default", outputs=(flat,))
                ops.append(replace(view, args=(at, tuple(shape))))
                op = replace(op, args=(op.args[0], (None, Ref(flat))))
        ops.append(op)
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _is_count(graph: LogicalGraph, indexed: str, index: str) -> bool:
    """Return whether the index is 0, 1, 2 … over the first dim of `indexed`."""
    length, shape = graph.tensors[indexed].shape[:1], graph.tensors[index].shape
    if shape != (*length, *(1,) * (len(shape) - 1)):
        return False
    maker = graph.producer.get(index)
    while maker is not None and maker.target == "aten.unsqueeze.default":
        maker = graph.producer.get(maker.inputs[0])
    return maker is not None and maker.target == "aten.arange.default"


def drop_dead(graph: LogicalGraph) -> LogicalGraph:
    """Drop ops, tensors and feeds that no result depends on."""
    wanted = {tensor for _, tensor in graph.results} | {v.new for v in graph.variables if v.new}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if wanted.intersection(op.makes):
            outputs = tuple(name if name in wanted else None for name in op.outputs)
            kept.append(replace(op, outputs=outputs))
            wanted.update(op.inputs)
    names = wanted | {v.tensor for v in graph.variables} | {f.tensor for f in graph.feeds}
    return replace(
        graph,
        ops=tuple(reversed(kept)),
        tensors={name: tensor for name, tensor in graph.tensors.items() if name in names},
        feeds=tuple(feed for feed in graph.feeds if feed.tensor in wanted),
    )
