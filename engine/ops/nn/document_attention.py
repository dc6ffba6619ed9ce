"""Signatures of attention within documents (engine/ops/nn/document_op.py).

Samples and heads are independent.
Documents are split with their samples, and whole where heads are split.  Nothing is split along the
length, where documents lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from flowrun.engine.ir.op_info import OpCost, OpInfo, ProductKind, Trait
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import OpView, Signature, row
from flowrun.engine.ops.nn import document_op  # noqa: F401  (it defines the op)
from flowrun.engine.ops.nn.attention import attention_flops

_TENSORS = ("grad", "query", "key", "value", "out", "logsumexp")


def _rows(view: OpView) -> tuple[Signature, ...]:
    """Return rows that split samples, of which documents are, and heads, of which they are not."""
    split = [dict.fromkeys(_TENSORS, S(dim)) for dim in (0, 1)]
    return (row(view.op, {**split[0], "documents": S(0)}, S(0)), row(view.op, split[1], S(1)))


def forward_rows(view: OpView) -> tuple[Signature, ...]:
    """(out, logsumexp).  Linear in the value."""
    return (*_rows(view), row(view.op, {"value": P}, P, B))


def backward_rows(view: OpView) -> tuple[Signature, ...]:
    """(grad_query, grad_key, grad_value).

    Linear in the output's gradient, and in value and output together.
    """
    return (
        *_rows(view),
        row(view.op, {"grad": P}, P, P, P),
        row(view.op, {"value": P, "out": P}, P, P, B),
    )


OPS: Mapping[str, OpInfo] = {
    "flowrun.document_attention.default": OpInfo(
        forward_rows,
        traits=(Trait.PRODUCT,),
        cost=OpCost(product=ProductKind.ATTENTION, flops=attention_flops),
    ),
    "flowrun.document_attention_backward.default": OpInfo(
        backward_rows,
        cost=OpCost(product=ProductKind.ATTENTION, flops=partial(attention_flops, backward=True)),
    ),
}
