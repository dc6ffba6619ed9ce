"""Signatures of scaled dot product attention.  Tensors are (batch, heads, length, head width).

Samples and heads are independent: both pass their split.  Queries are independent of each other, so
without a causal mask the query's length can be split against whole keys and values.  Not the keys'
length going forward, nor the head's width: the softmax is over the one and the scores are summed
over the other, inside the kernel.  Going backward the softmax is known (logsumexp), so the keys'
length can be split too.  With dropout no row but all-B: a mask is drawn inside.

Capture runs on the CPU, so that its op stands for attention on every device; CUDA's kernels for it
(runtime/kernels/fused_attention.py) leave logsumexp as it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpCost, OpInfo, ProductKind, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import OpView, Signature, bind, places, row

_QUERY = ("query", "out", "grad_out", "logsumexp")
_KEYS = ("key", "value")


def forward(view: OpView) -> tuple[Signature, ...]:
    """(output, logsumexp) follow the query.  Linear in the value."""
    partial = (row(view.op, {"value": P}, P, B),)
    queries = _split(view, 2, _QUERY, S(2), S(2))
    return _rows(view, 2, (queries,), partial)


def backward(view: OpView) -> tuple[Signature, ...]:
    """(grad_query, grad_key, grad_value).

    Linear in the output's gradient, and in value and output together.
    """
    partial = (
        row(view.op, {"grad_out": P}, P, P, P),
        row(view.op, {"value": P, "out": P}, P, P, B),
    )
    queries, keys = _split(view, 2, _QUERY, S(2), P, P), _split(view, 2, _KEYS, P, S(2), S(2))
    return _rows(view, 3, (queries, keys), partial)


def _rows(
    view: OpView,
    num_outputs: int,
    lengthwise: tuple[Signature, ...],
    partial: tuple[Signature, ...],
) -> tuple[Signature, ...]:
    given = bind(view.op)
    if given["dropout_p"] != 0:
        return ()
    each = [_split(view, d, (*_QUERY, *_KEYS), *(S(d),) * num_outputs) for d in (0, 1)]
    return (*each, *(() if given["is_causal"] else lengthwise), *partial)


def _split(view: OpView, dim: int, names: tuple[str, ...], *outputs: Sbp) -> Signature:
    """Split `names` along `dim`, and a mask (…, queries, keys) where it is not broadcast."""
    sbps: dict[str, Sbp] = dict.fromkeys(names, S(dim))
    of_scores = 3 if names == _KEYS else dim
    for name, shape in zip(places(view.op), view.in_shapes, strict=True):
        if name == "attn_mask":
            sbps[name] = _of_mask(shape, of_scores)
    return row(view.op, sbps, *outputs)


def _of_mask(shape: Shape, dim: int) -> Sbp:
    at = dim - (4 - len(shape))
    return S(at) if at >= 0 and shape[at] > 1 else B


def attention_flops(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None], backward: bool = False
) -> float:
    """Return the operations of two products of forward, or five of backward, each of queries with
    all keys.
    """
    query, key = in_shapes[1:3] if backward else in_shapes[:2]
    return (10.0 if backward else 4.0) * math.prod(query) * key[-2]


OPS: Mapping[str, OpInfo] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": OpInfo(
        forward,
        traits=(Trait.PRODUCT,),
        cost=OpCost(product=ProductKind.ATTENTION, flops=attention_flops),
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": OpInfo(
        backward,
        cost=OpCost(product=ProductKind.ATTENTION, flops=partial(attention_flops, backward=True)),
    ),
}
