"""Linear layers whose products, forward and backward, are of 8 bits, as torchao's Float8Linear.

An operand is scaled so that its largest fits, rounded, multiplied, and scaled back.  Rowwise: each
row of the first and column of the second has a scale, a power of two, and all are e4m3.
Tensorwise: each operand has one, and gradients are e5m2.  Scales are of the whole operand, however
ranks share it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from flowrun.engine.ops.nn.document_op import as_autocast
from flowrun.engine.torch_internals import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # torchao's: no division by 0


class Fp8Linear(nn.Linear):
    """An nn.Linear that multiplies 8 bits; a layer becomes one by its `__class__`."""

    rowwise: bool

    def forward(self, input: Tensor) -> Tensor:
        x, weight = as_autocast(input), as_autocast(self.weight)
        made: Tensor = Fp8Product.apply(x.flatten(0, -2), weight.t(), self.rowwise)  # type: ignore[no-untyped-call]
        made = made.unflatten(0, input.shape[:-1])  # type: ignore[no-untyped-call]
        return made if self.bias is None else made + as_autocast(self.bias)


class Fp8Product(torch.autograd.Function):
    """(m, k) @ (k, n) of 8 bits."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rowwise = rowwise  # type: ignore[attr-defined]
        return multiply(x, w, rowwise)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, w), rowwise = grads, ctx.saved_tensors, ctx.rowwise  # type: ignore[attr-defined]
        of_x = multiply(grad, w.t(), rowwise, gradient=True)
        return of_x, multiply(grad.t(), x, rowwise, gradient=True).t(), None


def multiply(a: Tensor, b: Tensor, rowwise: bool, gradient: bool = False) -> Tensor:
    """Return a (m, k) @ b (k, n), in their dtype.  gradient: a is one."""
    dims_a, dims_b, wide = ((1,), (0,), E4M3) if rowwise else ((0, 1), (0, 1), E5M2)
    narrow_a, scale_a = narrow(a, dims_a, wide if gradient else E4M3)
    narrow_b, scale_b = narrow(b, dims_b, E4M3)
    if a.dtype == torch.float64:  # the kernel has none
        return narrow_a.double() @ narrow_b.double() * scale_a * scale_b
    return scaled_mm(narrow_a, narrow_b, scale_a, scale_b, out_dtype=a.dtype)  # type: ignore[no-any-return]


def narrow(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in 8 bits, and its scales, one for `dims`; one dim: a power of two."""
    top = torch.finfo(dtype).max
    scale = (top / x.abs().amax(dims, True).double().clamp(min=LEAST)).float()
    scale = scale.log2().floor().exp2() if len(dims) == 1 else scale
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal()
