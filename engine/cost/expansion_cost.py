"""Seconds of the ordinary ops, and of the boxings between them, that an op becomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from flowrun.engine.boxing.boxing import path, path_seconds
from flowrun.engine.cost.op_cost import SizedOp, Tensors
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.graph import Op
from flowrun.engine.ops.registry import expand


class ExpansionCost(NamedTuple):
    """An op's expansion takes this on the busiest rank.

    work_s: seconds of its ops.  boxing_s: seconds of its boxings.  moves: steps of these that
    cross links.
    """

    work_s: float
    boxing_s: float
    moves: int


def expansion_cost(
    op: Op, tensors: Tensors, grid: tuple[int, ...], links: Sequence[Link], hardware: Hardware
) -> ExpansionCost:
    """Return what an op that needs an expansion costs by what it is replaced with.

    op: with its signature.  tensors: its inputs and outputs, by name.  grid, links: of the axes of
    its stage.
    """
    written, between = expand(op, tensors, grid)
    tensors = {**tensors, **{tensor.name: tensor for tensor in between}}
    made = dict(zip(op.inputs, op.in_sbp, strict=True))
    forms = set(made.items())
    work_s = boxing_s = 0.0
    moves = 0
    for each in written:
        work_s += SizedOp.local(each, tensors, grid).seconds(hardware)
        for form in zip(each.inputs, each.in_sbp, strict=True):
            if form in forms:
                continue
            forms.add(form)
            (name, nd_sbp), shape = form, tensors[form[0]].shape
            num_bytes = math.prod(shape) * tensors[name].dtype.itemsize
            boxing_s += path_seconds(made[name], nd_sbp, grid, shape, num_bytes, links)
            moves += sum(step.moves for step in path(made[name], nd_sbp, grid, shape))
        new = {out: sbp for out, sbp in zip(each.outputs, each.out_sbp, strict=True) if out}
        made |= new
        forms.update(new.items())
    return ExpansionCost(work_s, boxing_s, moves)
