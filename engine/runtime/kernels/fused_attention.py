"""Fused attention by device: capture, which runs on a CPU, writes the CPU's op.

On CUDA the same two calls go to `flowrun.attention` and its gradient, which are torch's kernels
there: in bf16 and fp16 without a mask cuDNN's where torch itself would take it (Hopper and
Blackwell), else FlashAttention (Dao 2023) from compute capability 8 on, and the memory-efficient
kernel for all else.  None draws at random: dropout is ops of its own by then.  They are ops, not
functions, so that Inductor calls them as they are.

Relied on of torch: `_fused_sdp_choice` says what scaled_dot_product_attention would take; results
of cuDNN's kernel lie as those of FlashAttention do, which is asked where shapes alone are wanted.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

_WIDEST = 256  # heads that FlashAttention knows
_WHOLE = 8  # widths are multiples of it, for either kernel
_ROWS = 32  # the efficient kernel pads logsumexp to a multiple of it
_BIAS = 16  # and takes a mask whose rows lie so many numbers apart, or a multiple


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
    """aten._scaled_dot_product_flash_attention_for_cpu, on whatever device: of query (samples,
    heads, queries, width), key and value (samples, heads, keys, width) the output, as query, and
    logsumexp (samples, heads, queries) in fp32.
    """
    how = {"attn_mask": attn_mask, "scale": scale}
    if query.is_cpu:
        run = aten._scaled_dot_product_flash_attention_for_cpu.default
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
    """The gradients of query, key and value on CUDA; arguments as of aten's for the CPU."""
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
    query, key, value = _whole(query), _whole(key), _whole(value)
    if _is_cudnn(query, key, value, mask, causal):
        out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        logsumexp = logsumexp.view(query.shape[:3])
    elif _is_flash(query, mask):
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
    else:
        out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
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
    grad, query, key, value, out = (_whole(x) for x in (grad, query, key, value, out))
    # seed and offset: what a kernel would draw dropout from, and looks at where there is some
    sizes = (None, None, query.shape[2], key.shape[2])
    if _is_cudnn(query, key, value, mask, causal):
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        rows = logsumexp.contiguous().view(*logsumexp.shape, *(_cudnn_stats(query.device) or ()))
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, query, key, value, out, rows, seed, seed, None),
            *(*sizes, 0.0, causal),
            scale=scale,
        )
    elif _is_flash(query, mask):
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, out, logsumexp),
            *(*sizes, 0.0, causal, seed, offset),
            scale=scale,
        )
    else:
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        rows = F.pad(logsumexp, (0, -logsumexp.shape[-1] % _ROWS))
        bias, wanted = _bias(query, key, mask), [True, True, True, False]
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *(grad, query, key, value, bias, out, rows, seed, seed, 0.0, wanted, causal),
            scale=scale,
        )
    one, two, three = (x[..., :width] for x in grads[:3])
    return one, two, three


for _name, _run in (("attention", _attention), ("attention_backward", _attention_backward)):
    for _where in ("CUDA", "Meta"):
        _OPS.impl(_name, _run, _where)


_picked: dict[Any, bool] = {}  # by dtype, shapes and causality


def _is_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Both ops ask the same, of the same query, key and value, and so go the same way."""
    if query.is_meta or mask is not None:
        return False
    how = (query.dtype, query.shape, key.shape, value.shape, causal)
    if how not in _picked:
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, causal)
        wanted = choice == SDPBackend.CUDNN_ATTENTION.value
        _picked[how] = wanted and _cudnn_stats(query.device) is not None
    return _picked[how]


@cache
def _cudnn_stats(device: torch.device) -> tuple[int, ...] | None:
    """What cuDNN's logsumexp has behind (samples, heads, queries): releases of torch differ.

    None, with a warning, where its kernel fails, or does not do what FlashAttention does: that one
    is used then.
    """
    draws = torch.Generator(device).manual_seed(0)
    grad, query, key, value = (
        torch.randn(2, 65, 3, 64, generator=draws, device=device).bfloat16().transpose(1, 2)
        for _ in range(4)
    )
    seed = torch.empty((), dtype=torch.int64, device=device)
    try:
        out, stats, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False
        )
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, query, key, value, out, stats, seed, seed, None, None, None, 65, 65, 0.0, True)
        )
        found = (out, stats.view(2, 3, 65), *grads)
        one, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        rest = aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, one, lse, None, None, 65, 65, 0.0, True),
            *(torch.empty(2, dtype=torch.uint64, device=device), seed.to(torch.uint64)),
        )
        for made, other in zip(found, (one, lse, *rest), strict=True):
            if made.stride() != other.stride():
                raise RuntimeError(f"results lie at {made.stride()}, not at {other.stride()}")
            torch.testing.assert_close(made, other, rtol=2**-4, atol=2**-4)
    except (RuntimeError, AssertionError) as error:
        warnings.warn(f"attention is FlashAttention's, not cuDNN's: {error}", stacklevel=2)
        return None
    return tuple(stats.shape[3:])


def _is_flash(query: Tensor, mask: Tensor | None) -> bool:
    """Both ops ask the same, and so go the same way."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return narrow and mask is None and query.shape[-1] <= _WIDEST and _has_flash()


@cache
def _has_flash() -> bool:
    """Of this process's device; without one (shapes alone are asked for) it is thought new."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 8


def _whole(x: Tensor) -> Tensor:
    """Zeros behind each head, which add nothing to a product; a head's numbers side by side."""
    x = F.pad(x, (0, -x.shape[-1] % _WHOLE)) if x.shape[-1] % _WHOLE else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Any:
    """What is added to the scores (samples, heads, queries, keys), in the dtype of the query."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    mask = F.pad(mask.to(query.dtype), (0, -keys % _BIAS))[..., :keys]
    return mask.expand(*query.shape[:3], key.shape[2])
