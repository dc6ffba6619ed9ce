"""Rowwise: ops that make every row of a tensor of the same row of what they read.

Seen as matrices: all dims but the last are rows.  What they make of some rows is what they make of
these rows beside all others, bit by bit.  So gelu is not here: its last elements, that fill no
vector, are computed otherwise, and which are last depends on where a tensor is cut.  exp2 does the
same, and is here all the same, inside WIDE: where rows fill no vectors, the last few elements of a
piece may differ by a rounding.  All ranks cut alike, so what several hold is equal on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops import cross_entropy
from flowrun.engine.ops.loss import NONE
from flowrun.engine.ops.signature import LocalCall, bind
from flowrun.engine.ops.traits import TARGETS, Trait

POINTWISE = frozenset(
    {
        "aten.add.Tensor",
        "aten.sub.Tensor",
        "aten.mul.Tensor",
        "aten.div.Tensor",
        "aten.exp.default",
        "aten.log.default",
        "aten.neg.default",
        "aten.relu.default",
        "aten.threshold_backward.default",
        "aten._to_copy.default",
    }
)
# ops along the last dim, which stays -> the number of the argument that names it
ALONG: Mapping[str, int] = {
    "aten._log_softmax.default": 1,
    "aten._softmax.default": 1,
    "aten._log_softmax_backward_data.default": 2,
    "aten._softmax_backward_data.default": 2,
    "aten.sum.dim_IntList": 1,
    "aten.amax.default": 1,
    "aten.logsumexp.default": 1,
}
# gradients of losses: each row with its target -> the arguments of which rows are cut
LOSSES: Mapping[str, tuple[str, ...]] = {
    "aten.nll_loss_backward.default": ("self", "target"),
    cross_entropy.BACKWARD: ("x", "lse", "target"),
}
ROWWISE = POINTWISE | frozenset(ALONG) | frozenset(LOSSES) | frozenset(TARGETS[Trait.RESHAPE])
# ops that make on the way what is as large as what they read or make
WIDE = frozenset({"aten.logsumexp.default", cross_entropy.BACKWARD})


@dataclass(frozen=True, slots=True)
class RowCount:
    """How many an op makes.  cut: the tensors read of which it needs the same rows alone."""

    count: int
    cut: frozenset[str]


def rows_of(op: Op, read: Sequence[Shape], made: Shape) -> RowCount | None:
    """None if a row is made of other rows, too, or there is only one.

    read, made: shapes of op.inputs and of the output on one rank.
    """
    count = math.prod(made[:-1])
    if op.target not in ROWWISE or len(op.inputs) == 0 or len(made) < 2 or count < 2:
        return None
    cut = _cut(op, read, made, count)
    return RowCount(count, frozenset(cut)) if cut else None


def _cut(op: Op, read: Sequence[Shape], made: Shape, count: int) -> set[str]:
    names = op.inputs
    if op.target in LOSSES:
        given = cross_entropy.given(op) if op.target == cross_entropy.BACKWARD else bind(op)
        rows = {ref.name for k, ref in given.items() if k in LOSSES[op.target]}
        return set() if given["reduction"] == NONE else rows  # that has a gradient for each row
    if op.target in ALONG:
        dims = op.args[ALONG[op.target]]
        found = {d % len(read[0]) for d in ((dims,) if isinstance(dims, int) else dims)}
        stays = found == {len(read[0]) - 1} and len(made) == len(read[0])
        return set(names) if stays else set()
    if op.target not in POINTWISE:
        same = read[0][-1:] == made[-1:] and math.prod(read[0]) == math.prod(made)
        return {names[0]} if same else set()
    cut = {n for n, s in zip(names, read, strict=True) if len(s) > 1 and _num_rows(s) == count}
    beside = (n in cut or _num_rows(s) == 1 for n, s in zip(names, read, strict=True))
    return cut if all(beside) else set()


def _num_rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


def on_matrix(op: Op, call: LocalCall) -> LocalCall:
    """The call of such an op on matrices."""
    if op.target not in ALONG:
        return call
    at = ALONG[op.target]
    last = -1 if isinstance(call.args[at], int) else (-1,)
    return replace(call, args=(*call.args[:at], last, *call.args[at + 1 :]))
