"""Kernels of attention within documents (engine/ops/nn/document_op.py).

On CUDA all samples are one list of tokens, with the places where documents begin: torch's kernels
of variable length, FlashAttention in bf16 and fp16 and the memory-efficient one else.  On Hopper it
is FlashAttention 3, where its package is installed (flash_kernels).  The places are made on the
device, so that nothing waits; a document of no tokens costs nothing but its place.  Of earlier keys
one document a sample is a span, and other tokens are in spans of no queries, or of no keys.

A kernel that is registered again takes the place of the one before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrun.engine import torch_internals as internals
from flowrun.engine.ops.nn import document_op as op
from flowrun.engine.runtime.kernels.cpu import products
from flowrun.engine.runtime.kernels.fused_attention import is_flash, pad_width

_ROW_MULTIPLE = 32  # the efficient kernel pads a document's logsumexp to a multiple of it
_FROM_TOP_LEFT = 1  # its number of a causal mask
_HOPPER = 9  # compute capability
_NO_WINDOW = (-1, -1)


@op.document_attention_backward.register_kernel("cpu")
def _backward_on_cpu(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return op.run_backward(products.attention_backward, given[:6], *given[6:])


@op.earlier_attention_backward.register_kernel("cpu")
def _earlier_backward_on_cpu(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return op.run_earlier_backward(products.attention_backward, given[:6], *given[6:])


@op.document_attention.register_kernel("cuda")
def _forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    return _run(query, key, value, _whole(documents, query.shape[2]), scale)


@op.document_attention_backward.register_kernel("cuda")
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    spans = _whole(documents, query.shape[2])
    return _run_backward(grad, query, key, value, out, logsumexp, spans, scale)


@op.earlier_attention.register_kernel("cuda")
def _earlier(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    start: int,
    first: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    spans, sees, _ = _one_document(documents, start, query.shape[2], first, key.shape[2])
    out, logsumexp = _run(query, key, value, spans, scale)
    rows = sees[:, None]  # what kernels make of no keys is theirs
    return (
        op.by_token(out.masked_fill(~rows.unsqueeze(-1), 0)),
        logsumexp.masked_fill(~rows, -math.inf),
    )


@op.earlier_attention_backward.register_kernel("cuda")
def _earlier_backward(
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
    spans, sees, seen = _one_document(documents, start, query.shape[2], first, key.shape[2])
    grads = _run_backward(grad, query, key, value, out, logsumexp, spans, scale)
    one, two, three = (
        op.by_token(x.masked_fill(~rows[:, None, :, None], 0))
        for x, rows in zip(grads, (sees, seen, seen), strict=True)
    )
    return one, two, three


# ---- lists of tokens -----------------------------------------------------------------------------


class Spans(NamedTuple):
    """Which tokens of two lists see each other.

    queries, keys: where each span begins in its list, and where the last ends, int32.
    most_queries, most_keys: of one span, at most.  causal: within a span.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    causal: bool


def _run(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None
) -> tuple[Tensor, Tensor]:
    samples, heads, length, width = query.shape
    scale = scale or width**-0.5
    parts = [_as_list(pad_width(x)) for x in (query, key, value)]
    if is_flash(query, None):
        flash = flash_kernels(query.device, query.dtype, parts[0].shape[-1])
        tokens, logsumexp = flash.forward(parts, spans, scale)
        logsumexp = logsumexp.view(heads, samples, length).transpose(0, 1)
    else:
        tokens, statistics, *_ = internals.efficient_attention_of_list(
            *(x.unsqueeze(0) for x in parts),
            *(None, *spans[:4], 0.0, _FROM_TOP_LEFT * spans.causal, True),
            scale=scale,
        )
        span, place = _places(spans.queries, samples * length)
        rows = statistics[span, :, place]  # (tokens, heads)
        logsumexp = rows.view(samples, length, heads).transpose(1, 2)
    out = tokens.view(samples, length, heads, -1).transpose(1, 2)[..., :width]
    return op.by_token(out), logsumexp.contiguous()


def _run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    spans: Spans,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    samples, heads, length, width = query.shape
    scale = scale or width**-0.5
    parts = [_as_list(pad_width(x)) for x in (grad, query, key, value, out)]
    if is_flash(query, None):
        rows = logsumexp.transpose(0, 1).reshape(heads, samples * length)
        flash = flash_kernels(query.device, query.dtype, parts[0].shape[-1])
        grads = flash.backward([*parts, rows], spans, scale)
    else:
        span, place = _places(spans.queries, samples * length)
        longest = length + -length % _ROW_MULTIPLE
        rows = logsumexp.new_zeros(len(spans.queries) - 1, heads, longest)
        rows[span, :, place] = logsumexp.transpose(1, 2).reshape(-1, heads)
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        first, *others, out = (x.unsqueeze(0) for x in parts)
        grads = internals.efficient_attention_of_list_backward(
            *(first, *others, None, out, *spans[:4], rows, 0.0),
            *(seed, seed, _FROM_TOP_LEFT * spans.causal, False),
            scale=scale,
        )
    one, two, three = (
        op.by_token(x.reshape(samples, -1, heads, x.shape[-1]).transpose(1, 2)[..., :width])
        for x in grads[:3]
    )
    return one, two, three


def _whole(documents: Tensor, length: int) -> Spans:
    """Return a span for each document of each sample, of `length` tokens."""
    internals.assert_async(
        (documents.sum(1) == length).all() & (documents >= 0).all(),
        "documents do not fill their sample",
    )
    starts = _starts(documents)
    return Spans(starts, starts, length, length, causal=True)


def _one_document(
    documents: Tensor, start: int, queries: int, first: int, keys: int
) -> tuple[Spans, Tensor, Tensor]:
    """Return spans of the tokens of one document in each sample, and those of the others without
    partners; and which queries and which keys are of it.  See op.count_earlier.
    """
    see, others = op.count_earlier(documents, start, queries, first, keys)
    zero = torch.zeros_like(see)
    spans = Spans(
        _starts(torch.stack([zero, see, queries - see], 1)),
        _starts(torch.stack([others, keys - others, zero], 1)),
        *(queries, keys, False),
    )
    sees = torch.arange(queries, device=see.device) < see[:, None]
    return spans, sees, torch.arange(keys, device=see.device) >= others[:, None]


def _starts(lengths: Tensor) -> Tensor:
    """Return where each span of all samples begins, and where the last ends: int32."""
    return F.pad(lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))


def _places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each token the number of its span among all, and its place in it."""
    at = torch.arange(tokens, device=starts.device)
    span = torch.searchsorted(starts, at.to(torch.int32), right=True) - 1
    return span, at - starts[span]


def _as_list(x: Tensor) -> Tensor:
    """Return (samples, heads, length, width) as a list of tokens (tokens, heads, width)."""
    return x.transpose(1, 2).flatten(0, 1)


# ---- FlashAttention ------------------------------------------------------------------------------


# (lists (tokens, heads, width), which tokens see each other, scale) -> its results
ListKernel = Callable[[Sequence[Tensor], Spans, float], tuple[Tensor, ...]]


class Flash(NamedTuple):
    """Kernels of spans of lists of tokens.

    forward: of (query, key, value) -> (out, logsumexp (heads, tokens)).
    backward: of (grad, query, key, value, out, logsumexp) -> gradients of query, key, value.
    """

    name: str
    forward: ListKernel
    backward: ListKernel


def _second(lists: Sequence[Tensor], spans: Spans, scale: float) -> tuple[Tensor, ...]:
    out, logsumexp, *_ = internals.flash_attention_of_list(
        *(*lists, *spans[:4], 0.0, spans.causal, False), scale=scale
    )
    return out, logsumexp


def _second_backward(lists: Sequence[Tensor], spans: Spans, scale: float) -> tuple[Tensor, ...]:
    # seed and offset of dropout: the kernel reads them only if there is some
    seed = torch.empty(2, dtype=torch.uint64, device=lists[0].device)
    offset = torch.empty((), dtype=torch.uint64, device=lists[0].device)
    grads: tuple[Tensor, ...] = internals.flash_attention_of_list_backward(
        *(*lists, *spans[:4], 0.0, spans.causal, seed, offset), scale=scale
    )
    return grads


def _third() -> Flash:
    kernels = internals.flash_attention_3_of_list()

    def run(
        gradient: bool, lists: Sequence[Tensor], spans: Spans, scale: float
    ) -> tuple[Tensor, ...]:
        more = () if gradient else (None,)
        how = (*spans[:4], scale, spans.causal, *_NO_WINDOW, *more)
        return kernels[gradient](*lists, *how)

    return Flash("FlashAttention 3", partial(run, False), partial(run, True))


FLASH_2 = Flash("FlashAttention 2", _second, _second_backward)


def has_flash_3() -> bool:
    """Return whether the package of FlashAttention 3 is installed."""
    return find_spec(internals.FLASH_3) is not None


@cache
def flash_kernels(device: torch.device, dtype: torch.dtype, width: int) -> Flash:
    """Return the kernels for heads of this dtype and width: on Hopper those of FlashAttention 3, if
    its package is there; those of 2, with a warning, if 3's fail or do not agree with them.
    """
    if not has_flash_3() or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return FLASH_2
    draws = torch.Generator(device).manual_seed(0)
    grad, *given = (
        torch.randn(130, 3, width, generator=draws, device=device).to(dtype) for _ in range(4)
    )
    starts = torch.tensor([0, 7, 27, 27, 65, 130], dtype=torch.int32, device=device)
    results, spans = [], Spans(starts, starts, 65, 65, causal=True)
    try:
        for flash in (third := _third(), FLASH_2):
            made = flash.forward(given, spans, 0.25)
            results.append((*made, *flash.backward([grad, *given, *made], spans, 0.25)))
        for ours, other in zip(*results, strict=True):
            torch.testing.assert_close(ours, other, rtol=2**-4, atol=2**-4)
    except (ImportError, AttributeError, TypeError, RuntimeError, AssertionError) as error:
        warnings.warn(f"{FLASH_2.name} runs instead of 3, on documents: {error}", stacklevel=2)
        return FLASH_2
    return third
