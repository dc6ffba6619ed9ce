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
from flowrun.engine.ops.nn import ring_attention as ring
from flowrun.engine.ops.nn.document_op import attend_to_block, attend_to_block_backward
from flowrun.engine.torch_internals import cpu_attention, cpu_attention_backward

_QUERY = ("query", "out", "grad_out", "grad", "logsumexp")
_KEYS = ("key", "value")
_SEEN = ("query", "key")
_OF_BLOCK = ("query", "key", "value", "out", "logsumexp")
_IN_ORDER = ("grad_out", "grad", *_OF_BLOCK)


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


# ---- pieces of the length ------------------------------------------------------------------------


def attend(
    met: Sequence[ring.Meeting],
    *given: Tensor,
    documents: Tensor | None = None,
    scale: float | None = None,
    wide: bool = False,
    run: Function = cpu_attention,
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp) of pieces of queries, one after the other; of those that see
    nothing 0 and -inf.

    given: query, key and value.  documents: of whole samples.  scale: of the scores.  wide: leave
    the output in fp32.  run: the kernel of whole tensors without documents.
    """
    query, *of_keys = given

    def call(queries: ring.Piece, keys: ring.Piece, own: bool) -> Sequence[Tensor]:
        parts = queries.of(query), *map(keys.of, of_keys)
        if documents is not None:
            return attend_to_block(queries.start, keys.start, parts, documents, scale)
        return run(*parts, 0.0, own, scale=scale)[:2]  # type: ignore[no-any-return]

    made = []
    for each in met:
        found = [call(each.queries, *keys) for keys in each.keys]
        made.append(_join_all(found) if found else _nothing(each.queries.of(query)))
    out, logsumexp = map(_one_after_another, zip(*made, strict=True))
    return out.to(logsumexp.dtype if wide else query.dtype), logsumexp


def _join_all(made: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    (out, logsumexp), *others = made
    for more, of_more in others:
        both = torch.logaddexp(logsumexp, of_more)
        share = (of_more - both).exp().nan_to_num(0.0).unsqueeze(-1)  # of -inf and -inf: 0
        out, logsumexp = torch.lerp(out.to(share.dtype), more.to(share.dtype), share), both
    return out, logsumexp


def _nothing(query: Tensor) -> Sequence[Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.zeros_like(query), query.new_full(query.shape[:-1], -math.inf, dtype=wide)


def _one_after_another(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces], 2)


def attend_backward(
    met: Sequence[ring.Meeting],
    *given: Tensor,
    documents: Tensor | None = None,
    scale: float | None = None,
    wide: bool = False,
    run: Function = cpu_attention_backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, the latter two from these queries alone.

    given: the output's gradient, query, key, value, output and logsumexp.  wide: return query's in
    fp32.  All else: as of attend.
    """
    sums = [torch.zeros_like(x) for x in given[1:4]]
    for each in met:
        for keys, own in each.keys:
            at = each.queries, each.queries, keys, keys, each.queries, each.queries
            parts = [piece.of(x) for piece, x in zip(at, given, strict=True)]
            if documents is not None:
                starts = each.queries.start, keys.start
                made = attend_to_block_backward(*starts, parts, documents, scale)
            else:
                made = run(*parts, 0.0, own, scale=scale)
            for whole, piece, part in zip(sums, at[1:4], made, strict=True):
                piece.of(whole).add_(part)
    of_query, of_key, of_value = sums
    dtype = torch.promote_types(of_query.dtype, torch.float32) if wide else of_query.dtype
    return of_query.to(dtype), of_key, of_value


def as_whole(program: Function) -> Function:
    """Return the function of whole tensors: what a rank runs that holds all blocks."""
    return lambda *given: program(
        given[-2].meetings(0, given[0].shape[2]),
        *given[:-3],
        documents=given[-3],
        scale=given[-1],
        wide=bool(given[-2].by),
    )


def on_a_rank(program: Function) -> Local:
    """Return the local program: a rank knows its place."""

    def local(view: LocalView) -> LocalCall:
        *tensors, documents, turns, scale = view.op.args
        met = turns.meetings(*view.in_slices[0][2])
        how = ("documents", documents), ("scale", scale), ("wide", bool(turns.by))
        return LocalCall(program, (met, *tensors), how)

    return local


def _from_start(program: Function) -> Local:
    """The op itself, unless its mask is causal and some of its queries are elsewhere."""

    def local(view: LocalView) -> LocalCall:
        given = view.given
        at = places(view.op).index("query")
        (start, count), whole = view.in_slices[at][2], view.in_shapes[at][2]
        if count == whole or not given.get("is_causal", True):
            return view.rebind()
        keys = [ring.Piece(0, whole, 0)]
        met = ring.meet([ring.Piece(0, count, start)], keys, True)
        how = [(name, given[name]) for name in ("documents", "scale") if name in given]
        read = (given[name] for name in _IN_ORDER if name in given)
        return LocalCall(program, (met, *read), tuple(how))

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
    if op.target in (ring.BLOCK, ring.BLOCK_BACKWARD):
        return ring.computed_share(op.args[-2], block)
    if not is_causal(op):
        return 1.0
    (*_, queries, _), (*_, keys, _) = _query_and_key(op, in_shapes)
    own = min(queries, keys)  # keys at the places of queries
    return 1.0 - (own * own - ring.causal_pairs(own, block)) / (queries * keys)


def _query_and_key(op: Op, in_shapes: Sequence[Shape]) -> Sequence[Shape]:
    return in_shapes[1:3] if "backward" in op.target else in_shapes[:2]


_COST = OpCost(product=ProductKind.ATTENTION, flops=_flops, seen=_seen)
_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
_DOCUMENTS = "flowrun.document_attention"
_FORWARD = OpInfo(
    forward,
    local=_from_start(attend),
    traits=(Trait.PRODUCT,),
    cost=_COST,
    expands=Expands("query", ring.ring_dims, ring.expand_forward),
)
_BACKWARD = OpInfo(
    backward,
    local=_from_start(attend_backward),
    cost=_COST,
    expands=Expands("query", ring.ring_dims, ring.expand_backward),
)

OPS: Mapping[str, OpInfo] = {
    f"{_FLASH}.default": _FORWARD,
    f"{_FLASH}_backward.default": _BACKWARD,
    f"{_DOCUMENTS}.default": _FORWARD,
    f"{_DOCUMENTS}_backward.default": _BACKWARD,
    ring.TURN: OpInfo(function=ring.turn_pieces),
    ring.SWAP_HALVES: OpInfo(function=ring.swap_halves),
    ring.BLOCK: OpInfo(
        ring.block,
        arguments=("query", "key", "value", "documents", "turns", "scale"),
        function=as_whole(attend),
        local=on_a_rank(attend),
        traits=(Trait.PRODUCT,),
        cost=_COST,
    ),
    ring.BLOCK_BACKWARD: OpInfo(
        ring.block_backward,
        arguments=("grad_out", *_OF_BLOCK, "documents", "turns", "scale"),
        function=as_whole(attend_backward),
        local=on_a_rank(attend_backward),
        cost=_COST,
    ),
}


def is_causal(op: Op) -> bool:
    """True of attention with a causal mask, or within documents."""
    known = OPS.get(op.target)
    return known is not None and known.expands is not None and bind(op).get("is_causal", True)


def balance(op: Op) -> Op:
    """Return a call of attention such that ranks get equal work; ops stay for which they have."""
    return replace(op, kwargs=(*op.kwargs, (ring.BALANCED, True))) if is_causal(op) else op


def gathered_keys(op: Op) -> frozenset[str]:
    """Return the keys and values of which ranks read all, though each has queries of its own."""
    if op.target not in OPS:
        return frozenset()
    read = dict(zip(places(op), zip(op.inputs, op.in_sbp, strict=True), strict=True))
    divided = [axis for axis, sbp in enumerate(read["query"][1]) if sbp == S(2)]
    ends = (read[end] for end in ("key", "value") if end in read)
    return frozenset(name for name, nd in ends if any(nd[axis] == B for axis in divided))
