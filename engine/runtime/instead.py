"""What runs in place of a torch op on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowrun.engine.runtime import pointwise, products

aten = torch.ops.aten


def kernel_of(function: Callable[..., Any], loose: bool = False) -> Callable[..., Any]:
    """Mostly the op itself.

    loose: what it makes may lie as it comes.
    """
    if not products.rule():
        return function
    return (_LOOSE if loose else _REPLACED).get(function, _REPLACED.get(function, function))


_REPLACED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.mm.default: products.mm,
    aten.addmm.default: products.addmm,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: products.attention_backward,
    aten.convolution.default: pointwise.convolution,
    aten.convolution_backward.default: pointwise.convolution_backward,
}
_LOOSE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.mm.default: products.mm_as_it_comes,
}
