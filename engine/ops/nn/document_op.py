"""The op of torch that attends within documents.

Several documents stand one after the other in a sample; a token sees itself and earlier tokens of
its own document alone.

Tensors are (samples, heads, length, head width).  `documents` (samples, most documents) says how
long each document of a sample is, in order, and 0 after the last; the lengths of a sample sum to
its tokens.  So documents cannot overlap or recur, their largest number is a shape, known before
anything runs, and where they begin is found on a device without a wait.

It knows nothing of the engine: models call it, also in plain torch.  Here each document is one call
of torch's kernel for CPUs; CUDA's are in runtime/kernels/packed_attention.py.

A rank that has some of the tokens attends to those that are its own as if its documents began and
ended there, and to earlier ones by `earlier_attention`: of each sample only the document that goes
on from them to the first of its queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrun.engine.torch_internals import cpu_attention, cpu_attention_backward

aten = torch.ops.aten


@torch.library.custom_op("flowrun::document_attention", mutates_args=(), device_types="cpu")
def document_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output, shaped as query, and the logsumexp of the scores (samples, heads, length).

    query, key, value: (samples, heads, length, width).  documents: lengths (samples, most
    documents).  scale: of the scores; None: 1 / sqrt(width).  Raise ValueError for documents that
    do not fill their sample.
    """
    run = cpu_attention
    spans = [*document_spans(documents, query.shape[2])]
    if len(spans) == len(query):
        out, logsumexp = run(query, key, value, 0.0, True, scale=scale)
        return by_token(out), logsumexp.clone(memory_format=torch.contiguous_format)
    out, logsumexp = _empty_output(query)
    for sample, inside in spans:
        parts = (x[sample, :, inside] for x in (query, key, value))
        results = run(*(x.unsqueeze(0) for x in parts), 0.0, True, scale=scale)
        out[sample, :, inside], logsumexp[sample, :, inside] = results[0][0], results[1][0]
    return out, logsumexp


def run_backward(
    run: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    documents: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute document_attention_backward of its `tensors` but documents.

    run: torch's gradient of attention on a CPU, or a function in its place.
    """
    _, query, *_ = tensors
    spans = [*document_spans(documents, query.shape[2])]
    if len(spans) == len(query):
        one, two, three = map(by_token, run(*tensors, 0.0, True, scale=scale))
        return one, two, three
    grads = _empty_gradients(*tensors[1:4])
    for sample, inside in spans:
        parts = (x[sample, :, inside].unsqueeze(0) for x in tensors)
        for whole, part in zip(grads, run(*parts, 0.0, True, scale=scale), strict=True):
            whole[sample, :, inside] = part[0]
    return grads  # type: ignore[no-any-return]


@torch.library.custom_op(
    "flowrun::document_attention_backward", mutates_args=(), device_types="cpu"
)
def document_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    grad: of the output.  query, key, value, documents, scale: as in `document_attention`.  out,
    logsumexp: its results.
    """
    given = (grad, query, key, value, out, logsumexp)
    return run_backward(cpu_attention_backward, given, documents, scale)


def document_spans(documents: Tensor, length: int) -> Iterator[tuple[int, slice]]:
    """Yield (sample, its tokens) of each document that has tokens.

    documents: lengths (samples, most documents).  length: tokens of a sample.  Raise ValueError for
    lengths that do not sum to it.
    """
    for sample, lengths in enumerate(documents.tolist()):
        if sum(lengths) != length or min(lengths) < 0:
            raise ValueError(
                f"documents of {lengths} tokens do not fill sample {sample} of {length} tokens"
            )
        start = 0
        for each in filter(None, lengths):
            yield sample, slice(start, start + each)
            start += each


# ---- some of the tokens of samples ---------------------------------------------------------------


@torch.library.custom_op("flowrun::earlier_attention", mutates_args=(), device_types="cpu")
def earlier_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    start: int,
    first: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp) of queries from the place `start` on, with keys from `first` on,
    which end before the queries; 0 and -inf of queries that see none of them.

    documents: of whole samples.  All else is as in `document_attention`.
    """
    out, logsumexp = _empty_output(query)
    out.zero_()
    logsumexp.fill_(-math.inf)
    for queries, keys in _earlier_spans(query, key, documents, start, first):
        made = cpu_attention(query[queries], key[keys], value[keys], 0.0, False, scale=scale)
        out[queries], logsumexp[queries] = made[:2]
    return out, logsumexp


@torch.library.custom_op("flowrun::earlier_attention_backward", mutates_args=(), device_types="cpu")
def earlier_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor,
    start: int,
    first: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, by these keys.

    out, logsumexp: by all keys.  documents, start, first: as in `earlier_attention`.
    """
    given = (grad, query, key, value, out, logsumexp)
    return run_earlier_backward(cpu_attention_backward, given, documents, start, first, scale)


def run_earlier_backward(
    run: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    documents: Tensor,
    start: int,
    first: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute earlier_attention_backward.  run, tensors: as of run_backward."""
    grads = tuple(x.zero_() for x in _empty_gradients(*tensors[1:4]))
    query, key = tensors[1:3]
    for queries, keys in _earlier_spans(query, key, documents, start, first):
        at = queries, queries, keys, keys, queries, queries
        parts = (x[each] for x, each in zip(tensors, at, strict=True))
        made = run(*parts, 0.0, False, scale=scale)
        for whole, each, part in zip(grads, at[1:4], made, strict=True):
            whole[each] = part
    return grads  # type: ignore[return-value]


def attend_to_block(
    start: int, first: int, given: Sequence[Tensor], documents: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp) of queries from the place `start` on, with keys from `first` on,
    at their own places or earlier ones.  given: query, key and value.
    """
    if first < start:
        made = earlier_attention(*given, documents, start, first, scale)
    else:
        within = documents_within(documents, start, given[0].shape[2])
        made = document_attention(*given, within, scale)
    return made  # type: ignore[no-any-return]


def attend_to_block_backward(
    start: int, first: int, given: Sequence[Tensor], documents: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    given: the output's gradient, query, key, value, and output and logsumexp by all keys.
    """
    if first < start:
        made = earlier_attention_backward(*given, documents, start, first, scale)
    else:
        within = documents_within(documents, start, given[1].shape[2])
        made = document_attention_backward(*given, within, scale)
    return made  # type: ignore[no-any-return]


def documents_within(documents: Tensor, start: int, length: int) -> Tensor:
    """Return the tokens that each document has among `length` of its sample from `start` on."""
    ends = documents.cumsum(1).clamp(start, start + length)
    return ends.diff(dim=1, prepend=torch.full_like(ends[:, :1], start))


def count_earlier(
    documents: Tensor, start: int, queries: int, first: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Return of each sample how many queries from `start` on are of the document that begins before
    them, and how many of `keys` keys from `first` on are of another.
    """
    ends = documents.cumsum(1)
    begins = ends - documents
    goes_on = (begins < start) & (start < ends)  # at most one
    see = ((ends - start).clamp(max=queries) * goes_on).sum(1)
    others = ((begins - first).clamp(0, keys) * goes_on).sum(1)
    none = others.eq(keys) | ~goes_on.any(1)
    return see.masked_fill(none, 0), others.masked_fill(none, keys)


def _earlier_spans(
    query: Tensor, key: Tensor, documents: Tensor, start: int, first: int
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield where there are queries that see earlier keys, and those keys."""
    counts = count_earlier(documents, start, query.shape[2], first, key.shape[2])
    for sample, (see, others) in enumerate(zip(*(x.tolist() for x in counts), strict=True)):
        if see:
            at = slice(sample, sample + 1), slice(None)
            yield (*at, slice(see)), (*at, slice(others, None))


def as_autocast(x: Tensor) -> Tensor:
    """Cast a tensor to the dtype of autocast's products; leave it alone if autocast is off."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def by_token(x: Tensor) -> Tensor:
    """Return a tensor (samples, heads, length, width) that lies in memory token by token."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_output(query: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    (out,) = _empty_gradients(query)
    return out, query.new_empty(query.shape[:3], dtype=wide)


def _empty_gradients(*tensors: Tensor) -> Any:
    return tuple(
        torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device) for x in tensors
    )


@earlier_attention.register_fake
@document_attention.register_fake
def _fake_forward(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_output(query)


@earlier_attention_backward.register_fake
@document_attention_backward.register_fake
def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(query, key, value)  # type: ignore[no-any-return]


def _save(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, documents)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.flowrun.document_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None


document_attention.register_autograd(_backward, setup_context=_save)
