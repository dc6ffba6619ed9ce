"""cpu_kernels: torch's op -> the kernel that runs in its place on this processor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from flowrun.engine.ir.signature import Function
from flowrun.engine.ops.math import matmul, reduce
from flowrun.engine.ops.nn import chunked_head, cross_entropy
from flowrun.engine.runtime.kernels.cpu import pixel_convolutions, products, row_chunks

aten = torch.ops.aten


def cpu_kernel(function: Function, any_stride: bool) -> Function:
    """Return the kernel in place of `function`, or `function`.  any_stride: of its result."""
    if function in _CHUNKED:
        return _CHUNKED[function]
    if not products.rule():
        return function
    return (_ANY_STRIDE if any_stride else _ONEDNN).get(function, _ONEDNN.get(function, function))


# the kernel asks where its tensors are
_CHUNKED: Mapping[Function, Function] = {
    reduce.log_sum_exp: row_chunks.log_sum_exp,
    matmul.multiply: partial(matmul.multiply, by=cpu_kernel),
    cross_entropy.gradient_of_logits: row_chunks.gradient_of_logits,
    chunked_head.head_statistics: partial(chunked_head.head_statistics, by=cpu_kernel),
    chunked_head.head_gradient: partial(chunked_head.head_gradient, by=cpu_kernel),
}
# where oneDNN is faster than what torch calls
_ONEDNN: Mapping[Function, Function] = {
    aten.mm.default: products.mm,
    aten.addmm.default: products.addmm,
    aten.convolution.default: pixel_convolutions.convolution,
    aten.convolution_backward.default: pixel_convolutions.convolution_backward,
}
_ANY_STRIDE: Mapping[Function, Function] = {aten.mm.default: products.mm_any_stride}
