"""Kernels of attention within documents (engine/ops/nn/document_op.py).

On CUDA all samples are one list of tokens, with the places where documents begin: torch's kernels
of variable length, FlashAttention in bf16 and fp16 and the memory-efficient one else.  On Hopper it
is FlashAttention 3, where its package is installed (flash_kernels).  The places are made on the
device, so that nothing waits; a document of no tokens costs nothing but its place.

A kernel that is registered again takes the place of the one before.
"""

from __future__ import annotations

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
def _backward_on_cpu(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return op.run_backward(products.attention_backward, grad, *given)


@op.document_attention.register_kernel("cuda")
def _forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    samples, heads, length, width = query.shape
    scale = scale or width**-0.5
    starts = _starts(documents, length)
    parts = [_as_list(pad_width(x)) for x in (query, key, value)]
    if is_flash(query, None):
        flash = flash_kernels(query.device, query.dtype, parts[0].shape[-1])
        tokens, logsumexp = flash.forward(parts, starts, length, scale)
        logsumexp = logsumexp.view(heads, samples, length).transpose(0, 1)
    else:
        tokens, statistics, *_ = internals.efficient_attention_of_list(
            *(x.unsqueeze(0) for x in parts),
            *(None, starts, starts, length, length, 0.0, _FROM_TOP_LEFT, True),
            scale=scale,
        )
        document, place = _places(starts, samples * length)
        rows = statistics[document, :, place]  # (tokens, heads)
        logsumexp = rows.view(samples, length, heads).transpose(1, 2)
    out = tokens.view(samples, length, heads, -1).transpose(1, 2)[..., :width]
    return op.by_token(out), logsumexp.contiguous()


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
    samples, heads, length, width = query.shape
    scale = scale or width**-0.5
    starts = _starts(documents, length)
    parts = [_as_list(pad_width(x)) for x in (grad, query, key, value, out)]
    if is_flash(query, None):
        rows = logsumexp.transpose(0, 1).reshape(heads, samples * length)
        flash = flash_kernels(query.device, query.dtype, parts[0].shape[-1])
        grads = flash.backward([*parts, rows], starts, length, scale)
    else:
        document, place = _places(starts, samples * length)
        longest = length + -length % _ROW_MULTIPLE
        rows = logsumexp.new_zeros(len(starts) - 1, heads, longest)
        rows[document, :, place] = logsumexp.transpose(1, 2).reshape(-1, heads)
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        first, *others, out = (x.unsqueeze(0) for x in parts)
        grads = internals.efficient_attention_of_list_backward(
            *(first, *others, None, out, starts, starts, length, length, rows, 0.0),
            *(seed, seed, _FROM_TOP_LEFT, False),
            scale=scale,
        )
    one, two, three = (
        op.by_token(x.reshape(samples, length, heads, -1).transpose(1, 2)[..., :width])
        for x in grads[:3]
    )
    return one, two, three


# ---- FlashAttention ------------------------------------------------------------------------------


# (lists (tokens, heads, width), where documents begin, most tokens of one, scale) -> its results
ListKernel = Callable[[Sequence[Tensor], Tensor, int, float], tuple[Tensor, ...]]


class Flash(NamedTuple):
    """Kernels of documents in one list of tokens.

    forward: of (query, key, value) -> (out, logsumexp (heads, tokens)).
    backward: of (grad, query, key, value, out, logsumexp) -> gradients of query, key, value.
    """

    name: str
    forward: ListKernel
    backward: ListKernel


def _second(
    lists: Sequence[Tensor], starts: Tensor, longest: int, scale: float
) -> tuple[Tensor, ...]:
    out, logsumexp, *_ = internals.flash_attention_of_list(
        *lists, starts, starts, longest, longest, 0.0, True, False, scale=scale
    )
    return out, logsumexp


def _second_backward(
    lists: Sequence[Tensor], starts: Tensor, longest: int, scale: float
) -> tuple[Tensor, ...]:
    # seed and offset of dropout: the kernel reads them only if there is some
    seed = torch.empty(2, dtype=torch.uint64, device=starts.device)
    offset = torch.empty((), dtype=torch.uint64, device=starts.device)
    grads: tuple[Tensor, ...] = internals.flash_attention_of_list_backward(
        *(*lists, starts, starts, longest, longest, 0.0, True, seed, offset), scale=scale
    )
    return grads


def _third() -> Flash:
    kernels = internals.flash_attention_3_of_list()

    def run(
        gradient: bool, lists: Sequence[Tensor], starts: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, ...]:
        more = () if gradient else (None,)
        how = (starts, starts, longest, longest, scale, True, *_NO_WINDOW, *more)
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
    results = []
    try:
        for flash in (third := _third(), FLASH_2):
            made = flash.forward(given, starts, 65, 0.25)
            results.append((*made, *flash.backward([grad, *given, *made], starts, 65, 0.25)))
        for ours, other in zip(*results, strict=True):
            torch.testing.assert_close(ours, other, rtol=2**-4, atol=2**-4)
    except (ImportError, AttributeError, TypeError, RuntimeError, AssertionError) as error:
        warnings.warn(f"{FLASH_2.name} runs instead of 3, on documents: {error}", stacklevel=2)
        return FLASH_2
    return third


# ---- lists of tokens -----------------------------------------------------------------------------


def _starts(documents: Tensor, length: int) -> Tensor:
    """Return where each document of all samples begins, and where the last ends: int32."""
    internals.assert_async(
        (documents.sum(1) == length).all() & (documents >= 0).all(),
        "documents do not fill their sample",
    )
    return F.pad(documents.flatten().cumsum(0, dtype=torch.int32), (1, 0))


def _places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each token the number of its document among all, and its place in it."""
    at = torch.arange(tokens, device=starts.device)
    document = torch.searchsorted(starts, at.to(torch.int32), right=True) - 1
    return document, at - starts[document]


def _as_list(x: Tensor) -> Tensor:
    """Return (samples, heads, length, width) as a list of tokens (tokens, heads, width)."""
    return x.transpose(1, 2).flatten(0, 1)
