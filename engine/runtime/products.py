"""Products: which library multiplies fp32 matrices on a CPU.

torch calls MKL, which leaves AVX-512 unused on processors that are not Intel's; oneDNN, that torch
calls for convolutions and bf16, uses it.  Seen on an AMD EPYC, one thread: 101 to 105 GFLOP/s
instead of 84 to 89, where the first matrix is as it lies in memory; where it is transposed, as in
the gradient of a weight, 5 to 10 % more than MKL if the result is far from square.  All ranks must
choose alike, for what several of them hold is computed by each: so this goes by facts of the
processor, and not by a measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

Tensor = torch.Tensor

_LEAST_FLOP = 1 << 24  # below, to enter oneDNN costs more than it saves


def kernel_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs in place of a torch op on this machine; mostly the op itself."""
    return _REPLACED.get(function, function) if onednn_is_faster() else function


@cache
def onednn_is_faster() -> bool:
    """True on processors with AVX-512 that are not Intel's."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return wide and torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD"


def mm(first: Tensor, second: Tensor) -> Tensor:
    """aten.mm of (m, k) and (k, n)."""
    if _is_large(first, second):
        rows, columns = first.shape[0], second.shape[1]
        if first.is_contiguous():
            return _linear(first, second, None)
        if first.t().is_contiguous() and columns >= 4 * rows:
            return _linear(first, second, None)
        if first.t().is_contiguous() and rows >= 4 * columns:
            return _linear(second.t(), first.t(), None).t().contiguous()
    return torch.ops.aten.mm.default(first, second)  # type: ignore[no-any-return]


def addmm(bias: Tensor, first: Tensor, second: Tensor, **factors: Any) -> Tensor:
    """aten.addmm of (n), (m, k) and (k, n); other shapes and factors are left to torch."""
    plain = not factors and bias.shape == second.shape[1:] and first.is_contiguous()
    if plain and _is_large(first, second):
        return _linear(first, second, bias)
    return torch.ops.aten.addmm.default(bias, first, second, **factors)  # type: ignore[no-any-return]


def _linear(first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    """x, weight (n, k), bias, and no function behind it: the op that Inductor calls."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    return linear(first, second.t(), bias, "none", [], None)  # type: ignore[no-any-return]


def _is_large(first: Tensor, second: Tensor) -> bool:
    flop = 2 * first.shape[0] * second.shape[0] * second.shape[1]
    return first.dtype == torch.float32 and first.is_cpu and flop >= _LEAST_FLOP


def _vendor() -> str:
    """As the processor names it; "" where it is not known."""
    if sys.platform != "linux":
        return ""
    with open("/proc/cpuinfo") as file:
        row = next((row for row in file if row.startswith("vendor_id")), "")
    return row.partition(":")[2].strip()


_REPLACED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.mm.default: mm,
    torch.ops.aten.addmm.default: addmm,
}
