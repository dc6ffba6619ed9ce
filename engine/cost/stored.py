"""Bytes that recomputation saves (stored for backward) and bytes that it repeats (boxed in
backward).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from flowrun.engine.boxing.boxing import path_bytes
from flowrun.engine.ir.graph import BACKWARD, FORWARD, WEIGHT_GRAD, LogicalGraph, Op
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.ops.flow.check import AFTER
from flowrun.engine.ops.traits import is_view
from flowrun.engine.strategy import Strategy


def stored_bytes(graph: LogicalGraph, strategy: Strategy, stage: int) -> int:
    """Return the bytes of one micro-batch that wait for backward on a rank of a stage.

    graph: every op has a signature.  A view counts as the tensor that it shows.  Tensors made of
    weights alone exist all step long and do not count.
    """
    stored: dict[tuple[str, int], int] = {}
    grid = strategy.placements[stage].shape
    for op in graph.ops:
        if op.phase not in (BACKWARD, WEIGHT_GRAD) or op.stage != stage:
            continue
        for name, nd_sbp in zip(op.inputs, op.in_sbp, strict=True):
            maker = graph.producer.get(name)
            if maker is None or maker.phase != FORWARD or name in graph.of_weights:
                continue
            tensor = graph.tensors[name]
            num_bytes = math.prod(largest_shape(tensor.shape, nd_sbp, grid)) * tensor.dtype.itemsize
            while maker is not None and is_view(maker.target):
                name = maker.inputs[0]
                maker = graph.producer.get(name)
            if maker is not None:  # else a view of a weight
                stored[name, num_bytes] = num_bytes
    return sum(stored.values())


def moved_bytes(graph: LogicalGraph, strategy: Strategy, ops: Iterable[Op]) -> float:
    """Return the bytes, over all ranks, of boxing between `ops` and the tensors that backward makes
    for them.
    """
    moved: dict[tuple[str, NdSbp], float] = {}
    for op in ops:
        grid = strategy.placements[op.stage].shape
        for name, nd_sbp in zip(op.inputs, op.in_sbp, strict=True):
            maker = graph.producer.get(name)
            if maker is not None and maker.phase == BACKWARD and maker.target != AFTER:
                tensor = graph.tensors[name]
                have = maker.sbp_of(name)
                moved[name, nd_sbp] = path_bytes(have, nd_sbp, grid, tensor.shape, tensor.num_bytes)
    return sum(moved.values())
