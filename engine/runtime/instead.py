"""What runs in place of a torch op on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowrun.engine.runtime import attention, pointwise, products

aten = torch.ops.aten


def kernel_of(function: Callable[..., Any], loose: bool = False) -> Callable[..., Any]:
    """Mostly the op itself.

    loose: what it makes may lie as it comes.
    """
    if function in _ATTENTION:
        return _ATTENTION[function]
    if not products.rule():
        return function
    return (_LOOSE if loose else _REPLACED).get(function, _REPLACED.get(function, function))


def _attention_backward(grad: torch.Tensor, *given: Any, **how: Any) -> tuple[torch.Tensor, ...]:
    run = products.attention_backward if grad.is_cpu else attention.backward
    return run(grad, *given, **how)


_ATTENTION: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention.forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
_REPLACED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.mm.default: products.mm,
    aten.addmm.default: products.addmm,
    aten.convolution.default: pointwise.convolution,
    aten.convolution_backward.default: pointwise.convolution_backward,
}
_LOOSE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.mm.default: products.mm_as_it_comes,
}
