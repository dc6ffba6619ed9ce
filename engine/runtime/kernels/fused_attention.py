"""Fused attention by device; capture runs on a CPU and records the CPU's op.

On CUDA the op and its gradient become `flowrun.attention` and `flowrun.attention_backward`, which
call torch's kernels.  In bf16 and fp16 without a mask that is cuDNN's kernel if torch itself would
choose it (Hopper and Blackwell), else FlashAttention (Dao 2023) from compute capability 8 on; in
all other cases it is the memory-efficient kernel.  None of them drops anything, as dropout is
separate ops by then.  They are ops, not functions, so that Inductor calls them unchanged.

FlashAttention computes the shapes of cuDNN's results too, whose strides are its own.  Gradients
read `out` as (samples, queries, heads, width) in memory, whatever its strides are (the efficient
kernel's and cuDNN's, in bf16 and fp16, seen on an H200 with torch 2.11).
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from flowrun.engine import torch_internals as internals

_MAX_FLASH_WIDTH = 256  # width of a head that FlashAttention supports
_WIDTH_MULTIPLE = 8  # every kernel needs a head width that is a multiple of it
_ROW_MULTIPLE = 32  # the efficient kernel pads logsumexp to a multiple of it
_BIAS_MULTIPLE = 16  # the efficient kernel needs a mask whose row stride is a multiple of it


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute aten._scaled_dot_product_flash_attention_for_cpu on any device.

    query: (samples, heads, queries, width).  key, value: (samples, heads, keys, width).  dropout_p:
    0 on CUDA.  attn_mask: added to the scores.  scale: None: 1 / sqrt(width).  Return the output,
    shaped as query, and the logsumexp of the scores (samples, heads, queries) in fp32.
    """
    how = {"attn_mask": attn_mask, "scale": scale}
    if query.is_cpu:
        run = internals.cpu_attention
        return run(query, key, value, dropout_p, is_causal, **how)  # type: ignore[no-any-return]
    assert not dropout_p, "capture writes dropout as ops of its own"
    run = torch.ops.flowrun.attention.default
    return run(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-any-return]


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value on CUDA.  out, logsumexp: of `forward`."""
    assert not dropout_p, "capture writes dropout as ops of its own"
    run = torch.ops.flowrun.attention_backward.default
    given = (grad, query, key, value, out, logsumexp)
    return run(*given, attn_mask, is_causal, scale)  # type: ignore[no-any-return]


# ---- the two ops ---------------------------------------------------------------------------------

_OPS = torch.library.Library("flowrun", "FRAGMENT")
_OPS.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float? scale)"
    " -> (Tensor, Tensor)"
)
_OPS.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor logsumexp, Tensor? mask, bool causal, float? scale) -> (Tensor, Tensor, Tensor)"
)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    width, scale = query.shape[-1], scale or query.shape[-1] ** -0.5
    query, key, value = pad_width(query), pad_width(key), pad_width(value)
    if _is_cudnn(query, key, value, mask, causal):
        out, logsumexp, *_ = internals.cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        logsumexp = logsumexp.view(query.shape[:3])
    elif is_flash(query, mask):
        out, logsumexp, *_ = internals.flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
    else:
        out, logsumexp, *_ = internals.efficient_attention(
            query, key, value, _bias(query, key, mask), True, 0.0, causal, scale=scale
        )
    return out[..., :width], logsumexp[..., : query.shape[2]]


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    width, scale = query.shape[-1], scale or query.shape[-1] ** -0.5
    grad, query, key, value, out = (pad_width(x) for x in (grad, query, key, value, out))
    out = _as_made(out)
    # seed and offset of dropout: kernels read them only if there is some
    sizes = (None, None, query.shape[2], key.shape[2])
    if _is_cudnn(query, key, value, mask, causal):
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        rows = logsumexp.contiguous().view(*logsumexp.shape, *(_cudnn_stats(query.device) or ()))
        grads = internals.cudnn_attention_backward(
            *(grad, query, key, value, out, rows, seed, seed, None),
            *(*sizes, 0.0, causal),
            scale=scale,
        )
    elif is_flash(query, mask):
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
        grads = internals.flash_attention_backward(
            *(grad, query, key, value, out, logsumexp),
            *(*sizes, 0.0, causal, seed, offset),
            scale=scale,
        )
    else:
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        rows = F.pad(logsumexp, (0, -logsumexp.shape[-1] % _ROW_MULTIPLE))
        bias, wanted = _bias(query, key, mask), [True, True, True, False]
        grads = internals.efficient_attention_backward(
            *(grad, query, key, value, bias, out, rows, seed, seed, 0.0, wanted, causal),
            scale=scale,
        )
    one, two, three = (x[..., :width] for x in grads[:3])
    return one, two, three


for _name, _run in (("attention", _attention), ("attention_backward", _attention_backward)):
    for _where in ("CUDA", "Meta"):
        _OPS.impl(_name, _run, _where)


_cudnn_choices: dict[tuple[object, ...], bool] = {}  # by dtype, shapes and causality


def _is_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Return whether cuDNN's kernel runs; the same for an op and its gradient."""
    if query.is_meta or mask is not None:
        return False
    how = (query.dtype, query.shape, key.shape, value.shape, causal)
    if how not in _cudnn_choices:
        choice = internals.choose_attention(query, key, value, None, 0.0, causal)
        wanted = choice == SDPBackend.CUDNN_ATTENTION.value
        _cudnn_choices[how] = wanted and _cudnn_stats(query.device) is not None
    return _cudnn_choices[how]


@cache
def _cudnn_stats(device: torch.device) -> tuple[int, ...] | None:
    """Return the dims that follow (samples, heads, queries) in cuDNN's logsumexp, of which releases
    of torch differ; None, with a warning, if cuDNN's kernel fails or does not agree with
    FlashAttention, which is used instead.
    """
    draws = torch.Generator(device).manual_seed(0)
    grad, query, key, value = (
        torch.randn(2, 65, 3, 64, generator=draws, device=device).bfloat16().transpose(1, 2)
        for _ in range(4)
    )
    seed = torch.empty((), dtype=torch.int64, device=device)
    try:
        out, stats, *_ = internals.cudnn_attention(query, key, value, None, True, 0.0, True, False)
        grads = internals.cudnn_attention_backward(
            *(grad, query, key, value, out, stats, seed, seed, None, None, None, 65, 65, 0.0, True)
        )
        results = (out, stats.view(2, 3, 65), *grads)
        one, lse, *_ = internals.flash_attention(query, key, value, 0.0, True)
        rest = internals.flash_attention_backward(
            *(grad, query, key, value, one, lse, None, None, 65, 65, 0.0, True),
            *(torch.empty(2, dtype=torch.uint64, device=device), seed.to(torch.uint64)),
        )
        for ours, other in zip(results, (one, lse, *rest), strict=True):
            if ours.stride() != other.stride():
                raise RuntimeError(f"its strides are {ours.stride()}, not {other.stride()}")
            torch.testing.assert_close(ours, other, rtol=2**-4, atol=2**-4)
    except (RuntimeError, AssertionError) as error:
        warnings.warn(f"FlashAttention runs instead of cuDNN's attention: {error}", stacklevel=2)
        return None
    return tuple(stats.shape[3:])


def is_flash(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether FlashAttention runs; the same for an op and its gradient."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and mask is None and query.shape[-1] <= _MAX_FLASH_WIDTH and _has_flash()


@cache
def _has_flash() -> bool:
    """Return whether the device supports FlashAttention; True without one, to compute shapes."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 8


def pad_width(x: Tensor) -> Tensor:
    """Pad heads with zeros, which add nothing to a product; make the last dim contiguous."""
    padding = -x.shape[-1] % _WIDTH_MULTIPLE
    x = F.pad(x, (0, padding)) if padding else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _as_made(out: Tensor) -> Tensor:
    """Return an output with the strides that forward gave it, which its gradient assumes."""
    by_row = out.transpose(1, 2)
    if by_row.is_contiguous():
        return out
    return by_row.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return what is added to the scores (samples, heads, queries, keys), in the query's dtype."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    mask = F.pad(mask.to(query.dtype), (0, -keys % _BIAS_MULTIPLE))[..., :keys]
    return mask.expand(*query.shape[:3], key.shape[2])
