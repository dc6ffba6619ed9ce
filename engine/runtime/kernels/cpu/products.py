"""products: the library that multiplies fp32 matrices on a CPU, and the dtype of attention.

torch calls MKL, which does not use AVX-512 on other processors than Intel's; oneDNN, which torch
calls for bf16 and most convolutions, does.  All ranks must choose alike, because each computes what
several hold; so the choice depends on facts of the processor and not on a measurement.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch

from flowrun.engine.torch_internals import cpu_attention_backward, onednn_linear

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ProductRule:
    """The products that oneDNN computes on a kind of processor.

    min_flop: operations of a product from which calling oneDNN pays.
    min_aspect: oneDNN copies a transposed first matrix, as in the gradient of a weight; this pays
        if one side of the result is at least this many times the other.
    min_bf16_keys: keys x width of a head from which the gradient of attention is faster in bf16
        than in fp32 with casts; 0: not measured.
    pixel_convolutions: also convolutions with 1 x 1 kernels; False: not measured.
    """

    min_flop: int
    min_aspect: float
    min_bf16_keys: int = 0
    pixel_convolutions: bool = False


# One thread: 101 to 105 GFLOP/s instead of 84 to 89; gradients of weights 5 to 10 % more.
# Attention's gradient of 128 keys in heads of 64: 2.5 instead of 5.4 ms; of 256, 9.2 and 9.9.
# ResNet-50, 8 images of 112 pixels on 2 ranks: 476 -> 439 ms with 1 x 1 convolutions.
HALF_WIDTH = ProductRule(1 << 24, 4.0, 1 << 14, pixel_convolutions=True)
# 210 to 240 GFLOP/s instead of 95 to 105; gradients of weights 130 to 210 instead of 95 to 105.
# Attention's gradient of 128 keys in heads of 64: 2.1 instead of 4.1 ms; of 256, equal.
# The 1 x 1 convolutions of ResNet-50, 4 images of 112 pixels: 65 instead of 137 ms.
FULL_WIDTH = ProductRule(1 << 22, 1.0, 1 << 14, pixel_convolutions=True)


@cache
def rule() -> ProductRule | None:
    """Return the rule of AMD's processors with AVX-512; None for all others.  From Zen 5 on (family
    26) the units of AVX-512 are as wide as its registers.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    is_amd = read_cpuinfo("vendor_id") == "AuthenticAMD"
    if not (has_avx512 and torch.backends.mkldnn.is_available() and is_amd):
        return None
    zen5 = int(read_cpuinfo("cpu family") or 0) >= 26
    return FULL_WIDTH if zen5 else HALF_WIDTH


def mm(first: Tensor, second: Tensor) -> Tensor:
    """Compute aten.mm of (m, k) and (k, n)."""
    return mm_any_stride(first, second).contiguous()


def mm_any_stride(first: Tensor, second: Tensor) -> Tensor:
    """Compute aten.mm of (m, k) and (k, n); the result may be column-major."""
    if _is_large(first, second):
        if first.is_contiguous():
            return _linear(first, second, None)
        rows, inner, columns = *first.shape, second.shape[1]
        if first.t().is_contiguous() and _has_aspect(rows, columns):
            if rows * inner <= (rows + inner) * columns:  # elements that each way copies
                return _linear(first, second, None)
            return _linear(second.t(), first.t(), None).t()
    return torch.ops.aten.mm.default(first, second)  # type: ignore[no-any-return]


def addmm(bias: Tensor, first: Tensor, second: Tensor, **factors: float) -> Tensor:
    """Compute aten.addmm: bias (n) + first (m, k) x second (k, n).  With `factors` (alpha, beta),
    or another shape of bias, torch's own kernel runs.
    """
    plain = not factors and bias.shape == second.shape[1:] and first.is_contiguous()
    if plain and _is_large(first, second):
        return _linear(first, second, bias)
    return torch.ops.aten.addmm.default(bias, first, second, **factors)  # type: ignore[no-any-return]


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *how: object,
    **more: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value (samples, heads, …, width) of fused attention.

    how, more: further arguments of torch's op.  In bf16 each block has a high fixed cost, so short
    sequences run in fp32.
    """
    given = (grad, query, key, value, out)
    run = cpu_attention_backward
    known, size = rule(), key.shape[-2] * key.shape[-1]
    if query.dtype != torch.bfloat16 or known is None or size >= known.min_bf16_keys:
        return run(*given, *how, **more)  # type: ignore[no-any-return]
    one, two, three = run(*(x.float() for x in given), *how, **more)
    return one.to(query.dtype), two.to(query.dtype), three.to(query.dtype)


def _linear(first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    """Call the op that Inductor calls: x, weight (n, k), bias, without a function on the result."""
    return onednn_linear()(first, second.t(), bias, "none", [], None)  # type: ignore[no-any-return]


def _is_large(first: Tensor, second: Tensor) -> bool:
    known, flop = rule(), 2 * first.shape[0] * second.shape[0] * second.shape[1]
    fits = first.dtype == torch.float32 and first.is_cpu
    return fits and known is not None and flop >= known.min_flop


def _has_aspect(rows: int, columns: int) -> bool:
    known = rule()
    return known is not None and max(rows, columns) >= known.min_aspect * min(rows, columns)


def read_cpuinfo(name: str) -> str:
    """Return a field of the first processor; "" if it is not known."""
    if sys.platform != "linux":
        return ""
    with open("/proc/cpuinfo") as file:
        row = next((row for row in file if row.startswith(name)), "")
    return row.partition(":")[2].strip()
