"""Signatures of scaled dot product attention.  Tensors are (batch, heads, length, head width).

Samples and heads are independent: both pass their split.  Queries are independent of each other, so
without a causal mask the query's length can be split against whole keys and values.  Not the keys'
length going forward, nor the head's width: the softmax is over the one and the scores are summed
over the other, inside the kernel.  Going backward the softmax is known (logsumexp), so the keys'
length can be split too.  With dropout no row but all-B: a mask is drawn inside.

The rows of `_for_cpu` are proved by the harness; those of the CUDA kernels (flash, efficient,
cuDNN) are the same mathematics under other names, unproved on a machine without CUDA.  They have no
rows along the length, for some pad logsumexp, and none where a mask wants a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ops.signature import OpView, Rule, Signature, bind, places, row
from flowrun.engine.placement import Shape
from flowrun.engine.sbp import B, P, S, Sbp

_QUERY = ("query", "out", "grad_out", "grad_out_", "logsumexp")
_KEYS = ("key", "value")


def forward(view: OpView) -> tuple[Signature, ...]:
    """(output, logsumexp, …): the first two follow the query, random state and the like stay B.

    Linear in the value.
    """
    partial = (row(view.op, {"value": P}, *_padded(view, P, B)),)
    queries = _split(view, 2, _QUERY, S(2), S(2))
    return _rows(view, 2, (queries,), partial)


def backward(view: OpView) -> tuple[Signature, ...]:
    """(grad_query, grad_key, grad_value).

    Linear in the output's gradient, and in value and output together.
    """
    grad = next(name for name in places(view.op) if name.startswith("grad_out"))
    partial = (
        row(view.op, {grad: P}, *_padded(view, P, P, P)),
        row(view.op, {"value": P, "out": P}, *_padded(view, P, P, B)),
    )
    queries, keys = _split(view, 2, _QUERY, S(2), P, P), _split(view, 2, _KEYS, P, S(2), S(2))
    return _rows(view, 3, (queries, keys), partial)


def _rows(
    view: OpView, made: int, lengthwise: tuple[Signature, ...], partial: tuple[Signature, ...]
) -> tuple[Signature, ...]:
    op, given = view.op, bind(view.op)
    mask_gradient = "efficient" in op.target and made == 3 and view.out_shapes[3] is not None
    if given["dropout_p"] != 0 or mask_gradient:
        return ()
    each = [_split(view, d, (*_QUERY, *_KEYS), *(S(d),) * made) for d in (0, 1)]
    by_length = not given["is_causal"] and "_for_cpu" in op.target
    return (*each, *(lengthwise if by_length else ()), *partial)


def _split(view: OpView, dim: int, names: tuple[str, ...], *outputs: Sbp) -> Signature:
    """Split `names` along `dim`, and a mask (…, queries, keys) where it is not broadcast."""
    sbps: dict[str, Sbp] = dict.fromkeys(names, S(dim))
    of_scores = 3 if names == _KEYS else dim
    for name, shape in zip(places(view.op), view.in_shapes, strict=True):
        if name in ("attn_mask", "attn_bias"):
            sbps[name] = _of_mask(shape, of_scores)
    return row(view.op, sbps, *_padded(view, *outputs))


def _of_mask(shape: Shape, dim: int) -> Sbp:
    at = dim - (4 - len(shape))
    return S(at) if at >= 0 and shape[at] > 1 else B


def _padded(view: OpView, *outputs: Sbp) -> tuple[Sbp, ...]:
    """Outputs beyond those named (random state, sizes) are B."""
    return (*outputs, *(B,) * (len(view.op.outputs) - len(outputs)))


_KERNELS = ["flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"]

RULES: Mapping[str, Rule] = {
    **{f"aten._scaled_dot_product_{kernel}.default": forward for kernel in _KERNELS},
    **{f"aten._scaled_dot_product_{kernel}_backward.default": backward for kernel in _KERNELS},
}
