"""pad_classes: trained -> trained.  Products around a cross entropy see a multiple of 64 classes.

GPT-2 has 50,257: no two rows of logits are aligned, and kernels of a GPU read them piecemeal.
flow.aligned_product adds zeros to what a rank has of the classes and cuts them off again.  Built
code pads where it makes the gradient of logits; a weight is copied each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from flowrun.engine.capture.rewrites.simplify import drop_dead
from flowrun.engine.ir.graph import LogicalGraph, Op, Ref
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.math.matmul import ALIGNED, CLASSES, MULTIPLE
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy

MOST_ADDED = 1 / 16  # share of the classes; a few are not worth it
_T = "aten.t.default"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def pad_classes(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Replace the products with a dim of classes, if the strategy asks for it."""
    if not strategy.pads_classes:
        return graph
    dims, notes = find_class_dims(graph), dict[str, str]()
    ops = tuple([_align(graph, op, dims, notes) for op in graph.ops])
    return drop_dead(replace(graph, ops=ops, notes=(*graph.notes, *notes.values())))


def find_class_dims(graph: LogicalGraph) -> Mapping[str, int]:
    """Return the dim of the classes of logits, from their product on, and of their gradients."""
    dims: dict[str, int] = {}
    for op in graph.ops:
        if op.target in (cross_entropy.FORWARD, cross_entropy.BACKWARD):
            dims[cross_entropy.given(op)["x"].name] = 1
        if op.target == cross_entropy.BACKWARD:
            dims[op.makes[0]] = 1
    ways = [(op, op.makes, op.inputs) for op in reversed(graph.ops)]
    ways += [(op, op.inputs, op.makes) for op in graph.ops]
    for op, known, new in ways:
        if dims.keys() & known[:1] and _carries_classes(graph, op):
            last = len(graph.tensors[new[0]].shape) - 1
            dims[new[0]] = 1 - dims[known[0]] if op.target == _T else last
    return dims


def _carries_classes(graph: LogicalGraph, op: Op) -> bool:
    """True of casts, transpositions, and views whose last dim stays."""
    view = has(op.target, Trait.RESHAPE) or has(op.target, Trait.IDENTITY)
    before, after = (graph.tensors[name].shape for name in (op.inputs[0], op.makes[0]))
    return op.target in (CAST, _T) or (view and before[-1:] == after[-1:])


def _align(graph: LogicalGraph, op: Op, dims: Mapping[str, int], notes: dict[str, str]) -> Op:
    """Return what stands in place of an op.  notes: module -> its note."""
    if op.target not in _PRODUCTS or op.kwargs:
        return op
    *bias, first, second = op.inputs
    operands = [_turn_back(graph, first, "mk"), _turn_back(graph, second, "kn")]
    tensors = [*operands, (op.makes[0], "mn")]
    label = next((its[dims[name]] for name, its in tensors if name in dims), "")
    sizes: dict[str, int] = {}
    for name, its in tensors:
        sizes.update(zip(its, graph.tensors[name].shape, strict=True))
    classes = sizes.get(label, 0)
    size = math.ceil(classes / MULTIPLE) * MULTIPLE
    whole = all(graph.tensors[name].shape == (sizes["n"],) for name in bias)
    if size == classes or size > classes * (1 + MOST_ADDED) or not whole:
        return op
    notes[op.module] = (
        f"{op.module}: its products see a multiple of {MULTIPLE} classes, zeros after the "
        f"{classes:,} (engine.pad_classes)"
    )
    equation = ",".join(its for _, its in operands) + "->mn"
    args = (*(Ref(name) for name, _ in operands), Ref(bias[0]) if bias else None)
    return replace(op, target=ALIGNED, args=(*args, equation.replace(label, CLASSES)), table=None)


def _turn_back(graph: LogicalGraph, name: str, labels: str) -> tuple[str, str]:
    """Return an operand before its transposition, and the labels of its dims."""
    maker = graph.producer.get(name)
    turned = maker is not None and maker.target == _T
    return (maker.inputs[0], labels[::-1]) if maker and turned else (name, labels)
