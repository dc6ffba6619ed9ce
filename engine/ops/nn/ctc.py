"""Signatures of the CTC loss (substitutes.py): samples are independent."""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ir.op_info import OpInfo
from flowrun.engine.ir.sbp import S
from flowrun.engine.ir.signature import OpView, Signature, partial_rows, row

_OF_SAMPLES = dict.fromkeys(("targets", "input_lengths", "target_lengths"), S(0))


def forward(view: OpView) -> tuple[Signature, ...]:
    """log_probs (time, samples, classes) -> loss (samples,), log_alpha (samples, time, …)."""
    return (row(view.op, {"log_probs": S(1), **_OF_SAMPLES}, S(0)),)


def backward(view: OpView) -> tuple[Signature, ...]:
    """Linear in the gradient."""
    given = dict.fromkeys(("grad", "loss", "log_alpha"), S(0))
    split = row(view.op, {"log_probs": S(1), **_OF_SAMPLES, **given}, S(1))
    return (split, *partial_rows(view.op, ("grad",)))


OPS: Mapping[str, OpInfo] = {
    "flowrun.ctc_loss.default": OpInfo(forward),
    "flowrun.ctc_loss_backward.default": OpInfo(backward),
}
