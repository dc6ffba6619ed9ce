"""Ops that write their result over one of their arguments (lowering/overwrite.py says which may).

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

from flowrun.engine.ops.op_info import OutVariant
from flowrun.engine.ops.registry import OPS, whole_function
from flowrun.engine.runtime.kernels.overrides import kernel_of

Tensor = torch.Tensor


def into(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function as one that takes a tensor before its arguments, fills it and returns it.

    A tensor that is not contiguous, and does not lie as the result would, is left alone: then the
    result is a new one.
    """
    variant = _variants()[function]
    overload = kernel_of(variant.overload)

    def write(made: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not made.is_contiguous() and not _lies_as_made(made, variant, args):
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        if variant.along_rows and not _lie_in_rows(made, *args):
            return made.copy_(function(*args, **kwargs))
        return overload(*args, **kwargs, **{variant.name: made})  # type: ignore[no-any-return]

    return write


def can_write(function: Callable[..., Any]) -> bool:
    """True if the function needs no memory of its own to write into a given tensor."""
    return function in _variants()


@cache
def _variants() -> Mapping[Callable[..., Any], OutVariant]:
    return {whole_function(target): known.out for target, known in OPS.items() if known.out}


def _lies_as_made(made: Tensor, variant: OutVariant, args: tuple[Any, ...]) -> bool:
    """True if the function, elementwise, would lay its result out as `made` lies."""
    if variant.along_rows:  # it may make a contiguous result of an argument that is not
        return False
    alike = (x for x in args if isinstance(x, Tensor) and x.shape == made.shape)
    return all(_strides(x) == _strides(made) for x in alike) and _lies_dense(made)


def _lie_in_rows(made: Tensor, *args: Any) -> bool:
    """True if the op works along the last dim of contiguous tensors.  args: (…, dim, flag)."""
    *read, dim, _ = args
    return dim % made.dim() == made.dim() - 1 and all(x.is_contiguous() for x in (made, *read))


def _strides(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _lies_dense(x: Tensor) -> bool:
    """True if the elements lie side by side, each by itself, in whatever order of dims."""
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
