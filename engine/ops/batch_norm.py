"""Signatures of batch norm.  Tensors are (samples, channels, …).

Channels are independent of each other.  In training a statistic of a channel is over all samples:
a split of those is legal, and reduces two numbers a channel inside (expansions/batch_norm.py).  Not
"S(0) -> S(0)" with each rank's own statistics: that is another function (`view: mirrored`).  With
given statistics (evaluation, a frozen norm) all dims are independent.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ops.signature import OpView, Rule, Signature, bind, partial_rows, places, row

_WHOLE = ("grad_out", "input")


def _channels(view: OpView, *outputs: int) -> Signature:
    """The channels split; outputs: dims of the channels."""
    given = {name: S(1 if name in _WHOLE else 0) for name in places(view.op)}
    return row(view.op, given, *(S(d) if d >= 0 else B for d in outputs))


def _samples(view: OpView) -> list[int]:
    """The dims over which statistics are, if the op is to make them."""
    return [d for d in range(len(view.in_shapes[0])) if d != 1]


def forward(view: OpView) -> tuple[Signature, ...]:
    """-> (out, mean, invstd, the two running statistics)."""
    op, rest = view.op, len(view.op.outputs) - 1
    trains = bind(op)["training"]
    reduced = 2 * view.in_shapes[0][1] if trains else 0
    rows = [row(op, {"input": S(d)}, S(d), *(B,) * rest, reduced=reduced) for d in _samples(view)]
    return (_channels(view, 1, *(0,) * rest), *rows)


def given_statistics(view: OpView) -> tuple[Signature, ...]:
    """-> (out, two outputs of no elements)."""
    rows = (row(view.op, {"input": S(d)}, S(d), B, B) for d in _samples(view))
    return (_channels(view, 1, -1, -1), *rows)


def backward(view: OpView) -> tuple[Signature, ...]:
    """-> gradients of (input, weight, bias).  The last two are what the ranks reduce inside."""
    op, trains = view.op, bind(view.op)["train"]
    reduced, over = (2 * view.in_shapes[0][1], B) if trains else (0, P)
    rows = [
        row(op, dict.fromkeys(_WHOLE, S(d)), S(d), over, over, reduced=reduced)
        for d in _samples(view)
    ]
    return (_channels(view, 1, 0, 0), *rows, *partial_rows(op, ("grad_out",)))


RULES: Mapping[str, Rule] = {
    "aten._native_batch_norm_legit_functional.default": forward,
    "aten._native_batch_norm_legit.no_stats": forward,
    "aten._native_batch_norm_legit_no_training.default": given_statistics,
    "aten.native_batch_norm_backward.default": backward,
}
