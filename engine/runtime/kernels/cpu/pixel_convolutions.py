"""Convolutions with 1 x 1 kernels, which are matrix products, and the library that computes them.

torch calls MKL for them if it has one thread and fewer than 16 samples, else oneDNN (products.py
says why MKL is slow).  oneDNN reorders images and weight, and its result back, which for the
gradient of a weight can take twice as long as the product.  If the weight is the largest of the
three, it is cheaper to permute the images into matrices of one row a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flowrun.engine.runtime.kernels.cpu import products

Tensor = torch.Tensor

# stride, padding, dilation, transposed, output_padding, groups
ConvolutionHow = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]
HowBackward = tuple[*ConvolutionHow, Sequence[bool]]  # and which gradients are wanted

aten = torch.ops.aten


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *given: *ConvolutionHow) -> Tensor:
    """Compute aten.convolution."""
    if _is_product(x, weight, given):
        given = _to_onednn(given)
    return aten.convolution.default(x, weight, bias, *given)  # type: ignore[no-any-return]


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: *HowBackward
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute aten.convolution_backward."""
    given, wanted = rest[:-1], rest[-1]
    of_weight = None
    if _is_product(x, weight, given):
        pixels, (out, channels) = grad[:, 0].numel(), weight.shape[:2]
        given = _to_onednn(given)
        if wanted[1] and pixels * (out + channels) <= out * channels:
            down, right = given[0]
            of_weight = products.mm(_rows(grad).t(), _rows(x[:, :, ::down, ::right]))
            wanted = (wanted[0], False, wanted[2])
    grads = aten.convolution_backward.default(grad, x, weight, bias_sizes, *given, wanted)
    return grads if of_weight is None else (grads[0], of_weight.view(weight.shape), grads[2])


def _is_product(x: Tensor, weight: Tensor, given: ConvolutionHow) -> bool:
    """Return whether a convolution is a product that is large enough for oneDNN."""
    rule = products.rule()
    if rule is None or not rule.pixel_convolutions or x.dtype != torch.float32 or not x.is_cpu:
        return False
    stride, padding, _, transposed, _, groups = given
    if weight.shape[2:] != (1, 1) or any(padding) or transposed or groups > 1:
        return False
    pixels: int = x.numel() // math.prod(stride)  # of all channels
    return 2 * pixels * len(weight) >= rule.min_flop


def _to_onednn(given: ConvolutionHow) -> ConvolutionHow:
    """Set a dilation, which changes nothing for a 1 x 1 kernel but makes torch call oneDNN."""
    stride, padding, _, transposed, output_padding, groups = given
    return stride, padding, (2, 2), transposed, output_padding, groups


def _rows(images: Tensor) -> Tensor:
    """Copy (samples, channels, height, width) to (samples x height x width, channels)."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])
