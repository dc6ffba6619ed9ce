"""overrides: kernels that run in the place of torch's own on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrun.engine.ir.signature import Function
from flowrun.engine.ops.nn import attention
from flowrun.engine.ops.shapes import create
from flowrun.engine.runtime.kernels import (
    fused_attention,
    packed_attention,  # noqa: F401  (kernels of an op of the engine)
)
from flowrun.engine.runtime.kernels.cpu import products
from flowrun.engine.runtime.kernels.cpu.cpu_kernels import cpu_kernel
from flowrun.engine.torch_internals import cpu_attention, cpu_attention_backward

aten = torch.ops.aten


def kernel_of(function: Function, any_stride: bool = False) -> Function:
    """Return what runs for a function of torch or of the engine, mostly that function itself.

    any_stride: its result may have any strides.
    """
    if function is create.constant:
        return cache_constant()
    return _BY_DEVICE.get(function) or cpu_kernel(function, any_stride)


def cache_constant() -> Callable[..., Tensor]:
    """Return flow.constant of one op, which copies its numbers to the device once: a copy from the
    host makes a step wait.  Each call returns a tensor of its own, which its reader may overwrite.
    """
    kept: list[Tensor] = []

    def constant(*given: Any, **how: Any) -> Tensor:
        if not kept:
            kept.append(create.constant(*given, **how))
        return kept[0].clone()

    return constant


def _attention_backward(grad: Tensor, *given: Any, **how: Any) -> tuple[Tensor, ...]:
    run = products.attention_backward if grad.is_cpu else fused_attention.backward
    return run(grad, *given, **how)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize low-precision activations with fp32 weights, as autocast leaves them on a CPU;
    CUDA's kernel takes only one dtype, so activations are cast there.
    """
    run = aten.native_layer_norm.default
    if x.is_cpu or weight is None or weight.dtype == x.dtype:
        return run(x, shape, weight, bias, eps)  # type: ignore[no-any-return]
    normed, mean, rstd = run(x.to(weight.dtype), shape, weight, bias, eps)
    return normed.to(x.dtype), mean, rstd


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *given: object,
) -> tuple[Tensor | None, ...]:
    run = aten.native_layer_norm_backward.default
    if x.is_cpu or weight is None or weight.dtype == x.dtype:
        return run(grad, x, shape, mean, rstd, weight, *given)  # type: ignore[no-any-return]
    wide = weight.dtype
    of_x, *others = run(grad.to(wide), x.to(wide), shape, mean, rstd, weight, *given)
    return (None if of_x is None else of_x.to(x.dtype), *others)


_BY_DEVICE: Mapping[Function, Function] = {
    cpu_attention: fused_attention.forward,
    cpu_attention_backward: _attention_backward,
    attention.attend: partial(attention.attend, run=fused_attention.forward),
    attention.attend_backward: partial(attention.attend_backward, run=_attention_backward),
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
