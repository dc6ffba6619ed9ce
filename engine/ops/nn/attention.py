"""Signatures of scaled dot product attention, and of that within documents (document_op.py).

Tensors are (batch, heads, length, head width).

Samples and heads are independent: both pass their split.  Queries are independent of each other, so
the query's length can be split against whole keys and values.  Where the mask is causal, a rank
attends to the keys before its queries, all of which they see, and to those at their own places, and
adds both up by their logsumexp.  Where all are split along the length, keys and values go around
(ring_attention.py).  Not the keys' length alone going forward, nor the head's width: the softmax is
over the one and the scores are summed over the other, inside the kernel.  Going backward the
softmax is known (logsumexp), so the keys' length can be split too.  With dropout no row but all-B:
a mask is drawn inside.

Within documents all this holds, too: they are split with their samples, and whole where heads or
the length are split, as they say where each token is.

Capture runs on the CPU, so that its op stands for attention on every device; CUDA's kernels for it
(runtime/kernels/fused_attention.py) leave logsumexp as it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import Expands, OpCost, OpInfo, ProductKind, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import (
    Function,
    Local,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Signature,
    bind,
    places,
)
from flowrun.engine.ops.nn import document_op
from flowrun.engine.ops.nn import ring_attention as ring
from flowrun.engine.torch_internals import cpu_attention, cpu_attention_backward

_QUERY = ("query", "out", "grad_out", "grad", "logsumexp")
_KEYS = ("key", "value")
_SEEN = ("query", "key")
_IN_ORDER = ("grad_out", "query", "key", "value", "out", "logsumexp")
_OF_DOCUMENTS = ("grad", *_IN_ORDER[1:], "documents")


def forward(view: OpView) -> OpRows:
    """(output, logsumexp) follow the query.  Linear in the value."""
    queries = _split(view, 2, _QUERY, S(2), S(2))
    return _rows(view, 2, (queries,), (view.row({"value": P}, P, B),))


def backward(view: OpView) -> OpRows:
    """(grad_query, grad_key, grad_value).

    Linear in the output's gradient, and in value and output together.
    """
    queries, keys = _split(view, 2, _QUERY, S(2), P, P), _split(view, 2, _KEYS, P, S(2), S(2))
    of_grad = view.row({"grad_out": P, "grad": P}, P, P, P)
    return _rows(view, 3, (queries, keys), (of_grad, view.row({"value": P, "out": P}, P, P, B)))


def _rows(view: OpView, num_outputs: int, lengthwise: OpRows, partial: OpRows) -> OpRows:
    given = view.given
    if given.get("dropout_p"):
        return ()
    *each, around = (_split(view, d, (*_QUERY, *_KEYS), *(S(d),) * num_outputs) for d in range(3))
    named = dict(zip(places(view.op), view.in_shapes, strict=True))
    lengths = [named[name][2] for name in _SEEN]
    if given.get("is_causal", True):
        lengthwise = lengthwise[: lengths[0] == lengths[1]]
    if ring.rings(view, lengths):
        turned = tuple(places(view.op).index(name) for name in _KEYS)
        each.append(replace(around, turned=turned))
    return (*each, *lengthwise, *partial)


def _split(view: OpView, dim: int, names: tuple[str, ...], *outputs: Sbp) -> Signature:
    """Split `names` along `dim`, a mask (…, queries, keys) where it is not broadcast, and documents
    with their samples.
    """
    sbps: dict[str, Sbp] = dict.fromkeys(names, S(dim))
    of_scores = 3 if names == _KEYS else dim
    for name, shape in zip(places(view.op), view.in_shapes, strict=True):
        if name == "attn_mask":
            sbps[name] = _of_mask(shape, of_scores)
        if name == "documents" and not dim:
            sbps[name] = S(0)
    return view.row(sbps, *outputs)


def _of_mask(shape: Shape, dim: int) -> Sbp:
    at = dim - (4 - len(shape))
    return S(at) if at >= 0 and shape[at] > 1 else B


# ---- some of the queries of a causal mask --------------------------------------------------------


def attend_from(
    start: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    run: Function = cpu_attention,
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp) of causal attention of some queries to keys from the first on.

    start: the place of the first query.  scale: of the scores.  run: the kernel of whole tensors.
    """
    made = [
        run(query, key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale)
        for keys, causal in _spans(start, query)
    ]
    if len(made) == 1:
        return made[0][0], made[0][1]
    parts, each = [out for out, _ in made], torch.stack([lse for _, lse in made])
    logsumexp = each.logsumexp(0)
    shares = (each - logsumexp).exp().unsqueeze(-1)
    out = sum(part * share for part, share in zip(parts, shares, strict=True))
    return out.to(query.dtype), logsumexp  # type: ignore[union-attr]


def attend_from_backward(
    start: int,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    scale: float | None = None,
    run: Function = cpu_attention_backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, the latter from these queries alone.

    start, scale, run: as of attend_from, whose results `out` and `logsumexp` are.
    """
    of_query, of_keys = torch.zeros_like(query), [torch.zeros_like(x) for x in (key, value)]
    for keys, causal in _spans(start, query):
        given = (grad, query, key[:, :, keys], value[:, :, keys], out, logsumexp)
        more, *parts = run(*given, 0.0, causal, scale=scale)
        of_query += more
        for whole, part in zip(of_keys, parts, strict=True):
            whole[:, :, keys] = part
    of_key, of_value = of_keys
    return of_query, of_key, of_value


def _spans(start: int, query: Tensor) -> list[tuple[slice, bool]]:
    """Return (keys, whether the mask hides some of them) for the one or two calls of a kernel,
    which of a causal mask has as many keys as queries: kernels of GPUs align others differently.
    """
    before = [(slice(0, start), False)] if start else []
    return [*before, (slice(start, start + query.shape[2]), True)]


def _from_start(program: Function, in_order: Sequence[str] = _IN_ORDER) -> Local:
    """The op itself, unless its mask is causal and some of its queries are elsewhere.

    in_order: the tensors of the program.
    """

    def local(view: LocalView) -> LocalCall:
        given = view.given
        at = places(view.op).index("query")
        (start, count), whole = view.in_slices[at][2], view.in_shapes[at][2]
        if count == whole or not given.get("is_causal", True):
            return view.rebind()
        read = (given[name] for name in in_order if name in given)
        return LocalCall(program, (start, *read), (("scale", given["scale"]),))

    return local


# ---- cost ----------------------------------------------------------------------------------------


def _flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Count two products of forward, or five of backward, each of queries with all keys."""
    query, key = _query_and_key(op, in_shapes)
    return (10.0 if "backward" in op.target else 4.0) * math.prod(query) * key[-2]


def _seen(op: Op, in_shapes: Sequence[Shape], block: int) -> float:
    """A causal kernel computes the blocks of keys up to that of the query itself; fewer queries
    than keys are the last ones, for which the other ranks wait.  Within documents the share is that
    of one document, the most there can be: their lengths are values.  Every other mask is a tensor,
    with which kernels compute all pairs.
    """
    if not _is_causal(op):
        return 1.0
    (*_, queries, _), (*_, keys, _) = _query_and_key(op, in_shapes)
    own = min(queries, keys)  # keys at the places of queries
    blocks = own // block
    below = block * block * blocks * (blocks + 1) / 2
    rest = (queries - blocks * block) * min((blocks + 1) * block, own)
    return (below + rest + queries * (keys - own)) / (queries * keys)


def _is_causal(op: Op) -> bool:
    if op.target in (ring.BLOCK, ring.BLOCK_BACKWARD):
        turns = op.args[-2]  # the last ranks see all of the keys that come to them
        return turns.causal and not any(turns.by)
    return bind(op).get("is_causal", True)  # type: ignore[no-any-return]


def _query_and_key(op: Op, in_shapes: Sequence[Shape]) -> Sequence[Shape]:
    return in_shapes[1:3] if "backward" in op.target else in_shapes[:2]


_COST = OpCost(product=ProductKind.ATTENTION, flops=_flops, seen=_seen)
_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
_DOCUMENTS = "flowrun.document_attention"
_FORWARD = OpInfo(
    forward,
    local=_from_start(attend_from),
    traits=(Trait.PRODUCT,),
    cost=_COST,
    expands=Expands("key", ring.ring_dims, ring.expand_forward),
)
_BACKWARD = OpInfo(
    backward,
    local=_from_start(attend_from_backward),
    cost=_COST,
    expands=Expands("key", ring.ring_dims, ring.expand_backward),
)

OPS: Mapping[str, OpInfo] = {
    f"{_FLASH}.default": _FORWARD,
    f"{_FLASH}_backward.default": _BACKWARD,
    f"{_DOCUMENTS}.default": replace(
        _FORWARD, local=_from_start(document_op.attend_from, _OF_DOCUMENTS)
    ),
    f"{_DOCUMENTS}_backward.default": replace(
        _BACKWARD, local=_from_start(document_op.attend_from_backward, _OF_DOCUMENTS)
    ),
    ring.TURN: OpInfo(function=ring.turn_pieces),
    ring.BLOCK: OpInfo(
        ring.block,
        arguments=("query", "key", "value", "documents", "turns", "scale"),
        function=ring.as_whole(ring.attend_blocks),
        local=ring.on_a_rank(ring.attend_blocks),
        traits=(Trait.PRODUCT,),
        cost=_COST,
    ),
    ring.BLOCK_BACKWARD: OpInfo(
        ring.block_backward,
        arguments=(*_IN_ORDER, "documents", "turns", "scale"),
        function=ring.as_whole(ring.attend_blocks_backward),
        local=ring.on_a_rank(ring.attend_blocks_backward),
        cost=_COST,
    ),
}
