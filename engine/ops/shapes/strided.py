"""Signatures of reads and writes by strides, which are counted over the elements in their order
(engine/capture/rewrites/strided_views.py makes it so), wherever a rank has them in memory.

Both are linear, so P passes.  The samples split where none reaches into another; frames that
overlap, as of a short-time Fourier transform, do so within a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from flowrun.engine.ir.op_info import OpInfo
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.signature import OpRows, OpView, rows, sizes


def read(view: OpView) -> OpRows:
    """as_strided splits samples that it reads each by itself."""
    slices = view.made
    each = view.in_shapes[0][:1] == slices[:1] and _by_samples(view, slices, view.in_shapes[0][0])
    return rows("P -> P", *(["S0 -> S0"] if each else []))


def write(view: OpView) -> OpRows:
    """as_strided_scatter: pieces of what src is written over, maybe flat, end with a sample."""
    whole, source = view.in_shapes
    aligned = bool(source) and (whole[:1] == source[:1] or source[0] % view.parts == 0)
    each = aligned and _by_samples(view, source, source[0])
    return rows("P,P -> P", *(["S0,S0 -> S0"] if each else []))


def _by_samples(view: OpView, output: Shape, samples: int) -> bool:
    """True if dim 0 of `output` takes each sample of the input by itself."""
    given = view.given
    steps: Sequence[int] = given["stride"]
    if not samples or not output or math.prod(view.in_shapes[0]) % samples:
        return False
    each = math.prod(view.in_shapes[0]) // samples
    offset = given["storage_offset"] or 0
    reach = offset + sum((n - 1) * s for n, s in zip(output[1:], steps[1:], strict=True))
    return steps[0] == each and reach < each


def in_order(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Read x as as_strided does, over its elements in their order.

    size, stride, storage_offset: as of torch.as_strided, in elements.
    """
    there = x.contiguous()  # maybe x itself, a piece of a buffer
    return there.as_strided(size, stride, there.storage_offset() + (storage_offset or 0))


def over_in_order(
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """Return x with `src` written as as_strided_scatter does, over its elements in their order.

    size, stride, storage_offset: as of torch.as_strided, in elements.
    """
    result = x.clone(memory_format=torch.contiguous_format)
    result.as_strided(size, stride, storage_offset or 0).copy_(src)
    return result


OPS: Mapping[str, OpInfo] = {
    "aten.as_strided.default": OpInfo(
        read, local=lambda view: view.rebind(in_order, size=view.made_shape)
    ),
    "aten.as_strided_scatter.default": OpInfo(
        write, local=lambda view: view.rebind(over_in_order, size=sizes(view.in_slices[1]))
    ),
}
