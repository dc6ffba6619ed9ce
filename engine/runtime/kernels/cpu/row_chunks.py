"""row_chunks: ops on logits that process some rows at a time.

Each has intermediate tensors as large as its logits in fp32; those of a few rows stay in the cache
of a core, and the whole is never in memory.  Each row depends on the same row of the inputs alone,
so that chunks change nothing but the last few elements of a chunk, which exp2 may round otherwise
if they do not fill a vector.  All ranks cut alike, so that results that several hold are equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flowrun.engine.ops.math import reduce
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import NONE

CHUNK_BYTES = 1 << 21  # of one tensor and thread
CUDA_CHUNK_BYTES = 1 << 26  # of one tensor; enough to fill a GPU


def log_sum_exp(
    x: Tensor, dims: tuple[int, ...], keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ops.math.reduce.log_sum_exp; in chunks of rows over the last dim."""
    if x.dim() < 2 or dims not in ((x.dim() - 1,), (-1,)):
        return reduce.log_sum_exp(x, dims, keepdim, dtype)
    count = _num_chunks(x)
    parts = [reduce.log_sum_exp(rows, dims, keepdim, dtype) for rows in x.tensor_split(count, -2)]
    return torch.cat(parts, -2 if keepdim else -1) if count > 1 else parts[0]


def gradient_of_logits(
    grad: Tensor,
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    *given: Any,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ops.nn.cross_entropy.gradient_of_logits; in chunks if the loss was reduced.

    x: (…, classes).  lse: (…, 1).  target: (…).
    """
    count = _num_chunks(x) if reduction != NONE else 1
    if count == 1:
        return cross_entropy.gradient_of_logits(
            grad, x, lse, target, weight, reduction, *given, out=out
        )
    whole = torch.empty_like(x) if out is None else out
    rows_of = ((x, -2), (lse, -2), (target, -1), (whole, -2))
    chunks = zip(*(t.tensor_split(count, dim) for t, dim in rows_of), strict=True)
    for rows, row_lse, classes, part in chunks:
        cross_entropy.gradient_of_logits(
            grad, rows, row_lse, classes, weight, reduction, *given, out=part
        )
    return whole


def _num_chunks(x: Tensor) -> int:
    """Return the number of chunks, of two rows at least: all threads would share the sum over a
    single row, in another order.
    """
    if not (x.is_cpu or x.is_cuda):
        return 1
    num_bytes = x.numel() * max(x.itemsize, 4)  # computed in fp32 at least
    most = CUDA_CHUNK_BYTES if x.is_cuda else CHUNK_BYTES * torch.get_num_threads()
    return max(1, min(x.shape[-2] // 2, math.ceil(num_bytes / most)))
