"""Ops that write their result over one of their arguments (which: lowering/reuse_buffers.py).

A result has the strides that the op itself would give it, or those of a contiguous tensor, which
every op takes: to a view or a kernel that reads it, others may be an error.

Relied on of torch: elementwise ops give a result the strides that all tensors of its shape that
they read have, if their elements lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from flowrun.engine.ir.op_info import OutVariant
from flowrun.engine.ir.signature import Function
from flowrun.engine.ops.registry import OPS, whole_function
from flowrun.engine.runtime.kernels.overrides import kernel_of

Tensor = torch.Tensor


def into(function: Function) -> Callable[..., Tensor]:
    """Return the function as one that takes a tensor before its arguments, fills and returns it.

    If that is not contiguous and has other strides than the result would have, it is left alone,
    and the result is a new tensor.
    """
    variant = _variants()[function]
    overload = kernel_of(variant.overload)

    def write(target: Tensor, *args: object, **kwargs: object) -> Tensor:
        if not target.is_contiguous() and not _has_strides_of_result(target, variant, args):
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        if variant.along_rows and not _is_along_rows(target, *args):
            return target.copy_(function(*args, **kwargs))
        return overload(*args, **kwargs, **{variant.name: target})  # type: ignore[no-any-return]

    return write


def can_write(function: Function) -> bool:
    return function in _variants()


@cache
def _variants() -> Mapping[Function, OutVariant]:
    return {whole_function(target): known.out for target, known in OPS.items() if known.out}


def _has_strides_of_result(target: Tensor, variant: OutVariant, args: tuple[object, ...]) -> bool:
    """Return whether an elementwise function would give its result the strides of `target`."""
    if variant.along_rows:  # its result may be contiguous though an argument is not
        return False
    alike = (x for x in args if isinstance(x, Tensor) and x.shape == target.shape)
    return all(_strides(x) == _strides(target) for x in alike) and _is_dense(target)


def _is_along_rows(target: Tensor, *args: Any) -> bool:
    """Return whether an op works along the last dim of contiguous tensors; args: (…, dim, flag)."""
    *read, dim, _ = args
    return dim % target.dim() == target.dim() - 1 and all(
        x.is_contiguous() for x in (target, *read)
    )


def _strides(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _is_dense(x: Tensor) -> bool:
    """Return whether the elements fill memory without gaps or repeats, in any order of dims."""
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
