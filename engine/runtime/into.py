"""Ops that write their result into memory that is there: over one of their arguments
(engine/overwrite.py says which may), or into rows of a larger tensor (engine/tile.py).

Relied on of torch: an overload that a device has a kernel of its own for writes where it is told;
others (relu.out) make a new tensor and copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowrun.engine.ops.cross_entropy import gradient_of_logits

Tensor = torch.Tensor

aten = torch.ops.aten


def into(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function as one that is given a tensor, then its arguments: it fills and returns it."""
    written = _OUT.get(function)

    def copied(made: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return made.copy_(function(*args, **kwargs))

    return written or copied


def can_write(function: Callable[..., Any]) -> bool:
    """True if it needs no memory of its own for that."""
    return function in _OUT


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


def _cast(made: Tensor, x: Tensor, **kwargs: Any) -> Tensor:
    return made.copy_(x)


_OUT: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    aten.add.Tensor: _out(aten.add.out),
    aten.sub.Tensor: _out(aten.sub.out),
    aten.mul.Tensor: _out(aten.mul.out),
    aten.div.Tensor: _out(aten.div.out),
    aten.exp.default: _out(aten.exp.out),
    aten.log.default: _out(aten.log.out),
    aten.neg.default: _out(aten.neg.out),
    aten.relu.default: _relu,
    aten.threshold_backward.default: _out(aten.threshold_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: _out(aten.gelu_backward.grad_input, "grad_input"),
    aten._to_copy.default: _cast,
    aten.sum.dim_IntList: _out(aten.sum.IntList_out),
    aten.amax.default: _out(aten.amax.out),
    aten.nll_loss_backward.default: _out(aten.nll_loss_backward.grad_input, "grad_input"),
    aten._softmax.default: _along_rows(aten._softmax.default, aten._softmax.out),
    aten._log_softmax.default: _along_rows(aten._log_softmax.default, aten._log_softmax.out),
    aten._softmax_backward_data.default: _along_rows(
        aten._softmax_backward_data.default, aten._softmax_backward_data.out, "grad_input"
    ),
    aten._log_softmax_backward_data.default: _along_rows(
        aten._log_softmax_backward_data.default, aten._log_softmax_backward_data.out
    ),
    gradient_of_logits: _out(gradient_of_logits),
}
