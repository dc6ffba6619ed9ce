"""Products: which library multiplies fp32 matrices on a CPU, and in which dtype attention's do.

torch calls MKL, which leaves AVX-512 unused on processors that are not Intel's; oneDNN, that torch
calls for bf16 and most convolutions, uses it.  All ranks must choose alike, for what several of
them hold is computed by each: so this goes by facts of the processor, and not by a measurement.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ProductRule:
    """What oneDNN is given.

    least_flop: below, to enter it costs more than it saves.
    oblong: it copies a first matrix that is transposed, as in the gradient of a weight; that pays
    where one side of the result is as many times the other.
    few_keys: keys x width of a head, below which the gradient of attention takes less time in fp32
    than in bf16, casts included; 0: not measured.
    pointwise: convolutions by kernels of one pixel (pointwise.py); False: not measured.
    """

    least_flop: int
    oblong: float
    few_keys: int = 0
    pointwise: bool = False


# One thread: 101 to 105 GFLOP/s instead of 84 to 89; gradients of weights 5 to 10 % more.
# Attention's gradient of 128 keys in heads of 64: 2.5 instead of 5.4 ms; of 256, 9.2 and 9.9.
# ResNet-50, 8 images of 112 pixels on 2 ranks: 476 -> 439 ms with pointwise convolutions.
HALF_WIDE = ProductRule(1 << 24, 4.0, 1 << 14, pointwise=True)
# 210 to 240 GFLOP/s instead of 95 to 105; gradients of weights 130 to 210 instead of 95 to 105.
# Attention's gradient of 128 keys in heads of 64: 2.1 instead of 4.1 ms; of 256, equal.
# The pointwise convolutions of ResNet-50, 4 images of 112 pixels: 65 instead of 137 ms.
WIDE = ProductRule(1 << 22, 1.0, 1 << 14, pointwise=True)


@cache
def rule() -> ProductRule | None:
    """For processors with AVX-512 that are not Intel's; from Zen 5 on (family 26) units are as wide
    as registers.
    """
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if not (wide and torch.backends.mkldnn.is_available() and _fact("vendor_id") == "AuthenticAMD"):
        return None
    return WIDE if int(_fact("cpu family") or 0) >= 26 else HALF_WIDE


def mm(first: Tensor, second: Tensor) -> Tensor:
    """aten.mm of (m, k) and (k, n)."""
    return mm_as_it_comes(first, second).contiguous()


def mm_as_it_comes(first: Tensor, second: Tensor) -> Tensor:
    """The same, but its columns may lie one behind the other."""
    if _is_large(first, second):
        if first.is_contiguous():
            return _linear(first, second, None)
        rows, inner, columns = *first.shape, second.shape[1]
        if first.t().is_contiguous() and _is_oblong(rows, columns):
            if rows * inner <= (rows + inner) * columns:  # what is copied one way, and the other
                return _linear(first, second, None)
            return _linear(second.t(), first.t(), None).t()
    return torch.ops.aten.mm.default(first, second)  # type: ignore[no-any-return]


def addmm(bias: Tensor, first: Tensor, second: Tensor, **factors: Any) -> Tensor:
    """aten.addmm of (n), (m, k) and (k, n); other shapes and factors are left to torch."""
    plain = not factors and bias.shape == second.shape[1:] and first.is_contiguous()
    if plain and _is_large(first, second):
        return _linear(first, second, bias)
    return torch.ops.aten.addmm.default(bias, first, second, **factors)  # type: ignore[no-any-return]


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *how: Any, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of torch's fused attention: of query, key and value (samples, heads, …, width).

    In bf16 it takes long to begin with each block, whatever its size.
    """
    given = (grad, query, key, value, out)
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    found, size = rule(), key.shape[-2] * key.shape[-1]
    if query.dtype != torch.bfloat16 or found is None or size >= found.few_keys:
        return run(*given, *how, **more)  # type: ignore[no-any-return]
    one, two, three = run(*(x.float() for x in given), *how, **more)
    return one.to(query.dtype), two.to(query.dtype), three.to(query.dtype)


def _linear(first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    """x, weight (n, k), bias, and no function behind it: the op that Inductor calls."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    return linear(first, second.t(), bias, "none", [], None)  # type: ignore[no-any-return]


def _is_large(first: Tensor, second: Tensor) -> bool:
    found, flop = rule(), 2 * first.shape[0] * second.shape[0] * second.shape[1]
    fits = first.dtype == torch.float32 and first.is_cpu
    return fits and found is not None and flop >= found.least_flop


def _is_oblong(rows: int, columns: int) -> bool:
    found = rule()
    return found is not None and max(rows, columns) >= found.oblong * min(rows, columns)


def _fact(name: str) -> str:
    """Of the processor, as it names it; "" where it is not known."""
    if sys.platform != "linux":
        return ""
    with open("/proc/cpuinfo") as file:
        row = next((row for row in file if row.startswith(name)), "")
    return row.partition(":")[2].strip()
