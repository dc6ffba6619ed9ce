"""Ops that write their result over one of their arguments (engine/overwrite.py says which may)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Tensor = torch.Tensor

aten = torch.ops.aten

_PIECE_BYTES = 1 << 21  # stays in the cache of a core; a device that is not a CPU has larger ones
_DEVICE_PIECE_BYTES = 1 << 26


def in_place(target: str, argument: int) -> Callable[..., Tensor]:
    """The op as a function that writes over its argument of that number."""
    function = _FUNCTIONS[target]
    if argument == 0:
        return function
    return lambda first, second: function(second, first)  # of two that may change places


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    function = aten._log_softmax.default
    if not _has_rows(x, dim):
        return function(x, dim, half_to_float)  # type: ignore[no-any-return]
    for (piece,) in _pieces(x):
        piece.copy_(function(piece, -1, half_to_float))
    return x


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    function = aten._log_softmax_backward_data.default
    if not _has_rows(grad, dim) or not output.is_contiguous():
        return function(grad, output, dim, dtype)  # type: ignore[no-any-return]
    for piece, made in _pieces(grad, output):
        piece.copy_(function(piece, made, -1, dtype))
    return grad


def _has_rows(x: Tensor, dim: int) -> bool:
    """The classes lie one behind the other."""
    return x.is_contiguous() and x.dim() > 0 and dim % x.dim() == x.dim() - 1


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of all at a time, so that what is made of them is copied while the cache has it."""
    flat = [x.view(-1, x.shape[-1]) for x in tensors]
    row_bytes = max(1, tensors[0].shape[-1] * tensors[0].itemsize)
    most = _PIECE_BYTES if tensors[0].is_cpu else _DEVICE_PIECE_BYTES
    return zip(*(x.split(max(1, most // row_bytes)) for x in flat), strict=True)


def _gelu_backward(grad: Tensor, x: Tensor, **how: Any) -> Tensor:
    return aten.gelu_backward.grad_input(grad, x, grad_input=grad, **how)  # type: ignore[no-any-return]


def _threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    made = aten.threshold_backward.grad_input(grad, x, threshold, grad_input=grad)
    return made  # type: ignore[no-any-return]


_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "aten.add.Tensor": aten.add_.Tensor,
    "aten.sub.Tensor": aten.sub_.Tensor,
    "aten.mul.Tensor": aten.mul_.Tensor,
    "aten.div.Tensor": aten.div_.Tensor,
    "aten.exp.default": aten.exp_.default,
    "aten.relu.default": aten.relu_.default,
    "aten.threshold_backward.default": _threshold_backward,
    "aten.gelu_backward.default": _gelu_backward,
    "aten._log_softmax.default": _log_softmax,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
}
