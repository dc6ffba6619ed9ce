"""Ops that write their result over one of their arguments (lowering/overwrite.py says which may).

A result has the strides that the op itself would give it, or those of a contiguous tensor, which
every op takes: to a view or a kernel behind it, others may be an error.

Relied on of torch: an overload that a device has a kernel of its own for writes where it is told;
others (relu.out) make a new tensor and copy it.  Elementwise ops give a result the strides that all
tensors of its shape that they read have, if their elements lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowrun.engine.ops.cross_entropy import gradient_of_logits
from flowrun.engine.runtime.kernels import row_chunks

Tensor = torch.Tensor

aten = torch.ops.aten


def into(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function as one that is given a tensor, then its arguments: it fills and returns it.  One
    that is not contiguous and does not lie as the result would is left alone: the result is new.
    """
    written = _OUT[function]

    def write(made: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not made.is_contiguous() and not _lies_as_made(made, function, args):
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        return written(made, *args, **kwargs)

    return write


def can_write(function: Callable[..., Any]) -> bool:
    """True if it needs no memory of its own for that."""
    return function in _OUT


def _lies_as_made(made: Tensor, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """True if the function, elementwise, would lay its result out as `made` lies."""
    if function in _ALONG_ROWS:
        return False
    alike = (x for x in args if isinstance(x, Tensor) and x.shape == made.shape)
    return all(_strides(x) == _strides(made) for x in alike) and _lies_dense(made)


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


def _out(overload: Callable[..., Tensor], name: str = "out") -> Callable[..., Tensor]:
    def write(made: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return overload(*args, **kwargs, **{name: made})

    return write


def _along_rows(
    function: Callable[..., Tensor], overload: Callable[..., Tensor], name: str = "out"
) -> Callable[..., Tensor]:
    """Its kernels read all of a row before they write an element, or write each where they have
    just read it, if rows lie one behind the other.
    """

    def write(made: Tensor, *args: Any) -> Tensor:
        *read, dim, _ = args
        last = dim % made.dim() == made.dim() - 1
        if last and all(x.is_contiguous() for x in (made, *read)):
            return overload(*args, **{name: made})
        return made.copy_(function(*args))

    return write


def _relu(made: Tensor, x: Tensor) -> Tensor:
    return aten.clamp_min.out(x, 0, out=made)  # type: ignore[no-any-return]


_OUT: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    aten.add.Tensor: _out(aten.add.out),
    aten.sub.Tensor: _out(aten.sub.out),
    aten.mul.Tensor: _out(aten.mul.out),
    aten.div.Tensor: _out(aten.div.out),
    aten.exp.default: _out(aten.exp.out),
    aten.relu.default: _relu,
    aten.threshold_backward.default: _out(aten.threshold_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: _out(aten.gelu_backward.grad_input, "grad_input"),
    aten._log_softmax.default: _along_rows(aten._log_softmax.default, aten._log_softmax.out),
    aten._log_softmax_backward_data.default: _along_rows(
        aten._log_softmax_backward_data.default, aten._log_softmax_backward_data.out
    ),
    gradient_of_logits: _out(row_chunks.gradient_of_logits),
}
# they may make a contiguous result of one that is not
_ALONG_ROWS = (
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
)
