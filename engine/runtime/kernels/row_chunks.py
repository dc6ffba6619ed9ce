"""row_chunks: two ops on logits that run some rows at a time on a CPU.

Each makes tensors as large as its logits on the way; of a few rows these stay in the cache of a
core, and are never there as a whole.  A row is made of the same row of what is read, so that the
result is the same but for the last few elements of a chunk: where rows fill no vectors, exp2 may
round these otherwise.  All ranks cut alike, so what several hold is equal on them.
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


def log_sum_exp(x: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """ops.math.reduce.log_sum_exp; in chunks where each row of a matrix is reduced."""
    count = _num_chunks(x) if x.dim() == 2 and dims in ((1,), (-1,)) else 1
    made = [reduce.log_sum_exp(rows, dims, keepdim) for rows in x.tensor_split(count)]
    return torch.cat(made) if count > 1 else made[0]


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
    """ops.nn.cross_entropy.gradient_of_logits; in chunks where the loss was reduced."""
    count = _num_chunks(x) if reduction != NONE else 1
    if count == 1:
        return cross_entropy.gradient_of_logits(
            grad, x, lse, target, weight, reduction, *given, out=out
        )
    made = torch.empty_like(x, dtype=lse.dtype) if out is None else out
    chunks = zip(*(t.tensor_split(count) for t in (x, lse, target, made)), strict=True)
    for rows, row_lse, classes, part in chunks:
        cross_entropy.gradient_of_logits(
            grad, rows, row_lse, classes, weight, reduction, *given, out=part
        )
    return made


def _num_chunks(x: Tensor) -> int:
    """At least two rows each: of a single one all threads would share the sum."""
    if not x.is_cpu:
        return 1
    num_bytes = x.numel() * max(x.itemsize, 4)  # computed in fp32 at least
    most = CHUNK_BYTES * torch.get_num_threads()
    return max(1, min(len(x) // 2, math.ceil(num_bytes / most)))
