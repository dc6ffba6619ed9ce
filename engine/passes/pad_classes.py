"""pad_classes: signed -> signed.  Products around a cross entropy see a multiple of 64 classes.

GPT-2 has 50,257: no two rows of logits are aligned, and kernels of a GPU read them piecemeal.
Weight, targets, loss and gradients keep their classes; next to each product

    logits = x @ w.t()        cut(x @ pad(w).t())
    dx = grad @ w             pad(grad) @ pad(w)
    dw = grad.t() @ x         cut(pad(grad).t() @ x)

a pad adds zeros after the classes (of each rank, where they are split), and a cut is a view, so
that the loss never sees them.  A weight is padded once a step, after its cast, where ranks have it
as the product reads it; else (ZeRO 3) each time that it was gathered.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from flowrun.engine.ir.graph import WEIGHTS, LogicalGraph, Op, Ref, rename_inputs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.sbp import NdSbp, S, Split
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.shapes.slice_cat import CUT, PAD
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy

MULTIPLE = 64
MOST_ADDED = 1 / 16  # share of the classes; a few classes are not worth it
_T = "aten.t.default"
_LABELS = ("n", "mk", "kn")  # of a bias and of the two operands; the output has "mn"


def pad_classes(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Pad the classes of the products around cross entropies, if the strategy asks for it."""
    if not strategy.pads_classes:
        return graph
    padder = _Padder(graph, strategy)
    ops = tuple(new for op in graph.ops for new in padder.rewrite(op))
    notes = (*graph.notes, *padder.notes.values())
    return replace(graph, ops=ops, tensors=padder.tensors, notes=notes)


def class_dims(graph: LogicalGraph) -> Mapping[str, int]:
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


class _Operand(NamedTuple):
    """An operand of a product whose dim `dim` are the classes."""

    name: str
    dim: int
    nd_sbp: NdSbp


class _Padder:
    """The tensors as products change.

    padded: (tensor, nd-SBP, phase) -> its name with pads.  notes: module -> its note.
    """

    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.graph = graph
        self.grids = [placement.shape for placement in strategy.placements]
        self.tensors = dict(graph.tensors)
        self.dims = class_dims(graph)
        self.padded: dict[tuple[str, NdSbp, str], str] = {}
        self.notes: dict[str, str] = {}

    def rewrite(self, op: Op) -> Iterator[Op]:
        """Yield a product with its classes padded, between pads and a cut; or the op as it is."""
        label, held = self._find_classes(op)
        classes, size, parts = self._sizes(op, held[-1]) if held else (0, 0, 1)
        if size == classes:
            yield op
            return
        names: dict[str, str] = {}
        for operand in held:
            names[operand.name] = yield from self._pad(op, operand, size, parts)
        self.notes[op.module] = (
            f"{op.module}: its products see {size:,} classes, {classes:,} and zeros: rows are "
            "aligned (engine.pad_classes)"
        )
        padded = rename_inputs(op, names)
        if label in "mn":
            out = _Operand(op.makes[0], "mn".index(label), op.out_sbp[0])
            name = self._add(out, size)
            yield replace(padded, outputs=(name,))
            yield _piecewise(op, CUT, (name, out.name), out, (classes, parts))
        else:
            yield padded

    def _find_classes(self, op: Op) -> tuple[str, list[_Operand]]:
        """Return the label of the classes in a product, and the operands that have it."""
        if op.target not in ("aten.mm.default", "aten.addmm.default"):
            return "", []
        labels = _LABELS[-len(op.inputs) :]
        tensors = [(op.makes[0], "mn"), *zip(op.inputs, labels, strict=True)]
        label = next((its[self.dims[name]] for name, its in tensors if name in self.dims), "")
        return label, [
            _Operand(name, its.index(label), nd_sbp)
            for name, its, nd_sbp in zip(op.inputs, labels, op.in_sbp, strict=True)
            if label and label in its and self.tensors[name].shape[its.index(label)] > 1
        ]

    def _sizes(self, op: Op, operand: _Operand) -> tuple[int, int, int]:
        """Return (classes, classes with zeros, their pieces); the same number twice where nothing
        is gained, or where several axes split them.
        """
        classes, grid = self.tensors[operand.name].shape[operand.dim], self.grids[op.stage]
        split = [n for n, sbp in zip(grid, operand.nd_sbp, strict=True) if sbp == S(operand.dim)]
        parts = math.prod(split)
        size = math.ceil(classes / (parts * MULTIPLE)) * parts * MULTIPLE
        gains = len(split) < 2 and size <= classes * (1 + MOST_ADDED)
        return classes, size if gains else classes, parts

    def _pad(
        self, reader: Op, operand: _Operand, size: int, parts: int
    ) -> Generator[Op, None, str]:
        """Yield what pads an operand, before its transposition, and return the name.  It is padded
        once for all that read it alike.
        """
        name, dim, nd_sbp = operand
        maker = self.graph.producer.get(name)
        if maker is not None and maker.target == _T:
            turned = tuple(S(1 - sbp.dim) if isinstance(sbp, Split) else sbp for sbp in nd_sbp)
            read = yield from self._pad(
                reader, _Operand(maker.inputs[0], 1 - dim, turned), size, parts
            )
            view = self._add(operand, size)
            turn = replace(maker, name=view, args=(Ref(read),), outputs=(view,), phase=reader.phase)
            yield replace(turn, stage=reader.stage, in_sbp=(turned,), out_sbp=(nd_sbp,))
            return view
        source = self.graph.variable_of.get(name)
        phase, there = reader.phase, (-1, nd_sbp)
        if maker is not None:
            phase, there = maker.phase, (maker.stage, maker.sbp_of(name))
        elif source is not None and name in self.graph.of_weights:
            phase, there = WEIGHTS, (source.stage, source.nd_sbp)
        phase = phase if there == (reader.stage, nd_sbp) else reader.phase
        key = name, nd_sbp, phase
        if key not in self.padded:
            self.padded[key] = self._add(operand, size)
            pad = _piecewise(reader, PAD, (name, self.padded[key]), operand, (size, parts))
            yield replace(pad, phase=phase)
        return self.padded[key]

    def _add(self, like: _Operand, size: int) -> str:
        """Add a tensor with `size` classes, and return its name."""
        count = sum(name.startswith(f"{like.name}/padded") for name in self.tensors)
        name, shape = f"{like.name}/padded{count or ''}", list(self.tensors[like.name].shape)
        shape[like.dim] = size
        self.tensors[name] = replace(self.tensors[like.name], name=name, shape=tuple(shape))
        return name


def _piecewise(
    like: Op, target: str, names: tuple[str, str], at: _Operand, how: tuple[int, int]
) -> Op:
    """Return a pad or a cut.  names: read and made.  how: classes after it, pieces."""
    (read, output), laid = names, {"in_sbp": (at.nd_sbp,), "out_sbp": (at.nd_sbp,)}
    args = (Ref(read), at.dim, *how)
    op = replace(like, name=f"{output}/{target}", target=target, args=args, kwargs=(), **laid)
    return replace(op, outputs=(output,))
