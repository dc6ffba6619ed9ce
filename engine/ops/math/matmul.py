"""Signatures of matrix products.

Two dims meet in a product: a dim that both operands have and the output lacks is contracted, and
its split gives P. A product is linear in each operand, not in both at once: "P,P -> P" would lose
the cross terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpCost, OpInfo, ProductKind, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import (
    Function,
    Labels,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Rule,
    Signature,
    labelled_rows,
)
from flowrun.engine.torch_internals import scaled_mm

Tensor = torch.Tensor
PRODUCT, CLASSES, MULTIPLE = "flow.product", "c", 64


def product(equation: str, first: str, second: str) -> Rule:
    """Make the rule of an einsum of two arguments, `first` and `second` in the operator's schema.

    equation: as of torch.einsum, without the ellipsis.
    """
    left, out = equation.split("->")
    ins = [tuple(labels) for labels in left.split(",")]
    table = labelled_rows(ins, [tuple(out)], dict.fromkeys(set(ins[0]) & set(ins[1]) - set(out), P))
    return lambda view: (*table, *view.partial((first,), (second,)))


def addmm(view: OpView) -> OpRows:
    """bias + a @ b, bias broadcast to the product; the whole is P only if the bias is P too.

    "B,S(1),S(0) -> P" is absent: every rank would add the bias.  Boxing a bias B -> P moves
    nothing.
    """
    bias = view.in_shapes[0]
    batch = ("b",) if view.op.target == "aten.baddbmm.default" else ()
    first, second = ("batch1", "batch2") if batch else ("mat1", "mat2")
    out: Labels = (*batch, "m", "n")
    own: Labels = tuple(
        label if size > 1 else None
        for label, size in zip(out[len(out) - len(bias) :], bias, strict=True)
    )
    k = len(batch)
    return (
        *labelled_rows([own, (*batch, "m", "k"), (*batch, "k", "n")], [out]),
        view.row({"self": P, first: S(k + 1), second: S(k)}, P),
        view.row({"self": P, first: P}, P),
        view.row({"self": P, second: P}, P),
    )


# ---- products by labels (capture/keep_lengths.py, passes/head_products.py) -----------------------


def labels_of(equation: str) -> tuple[str, str, str]:
    """Return the labels of both operands and of the output of "btk,nk->btn"."""
    left, out = equation.split("->")
    first, second = left.split(",")
    return first, second, out


def rows_of_product(view: OpView) -> OpRows:
    """A bias is added once, so partial sums of the product need a partial bias."""
    first, second, out = labels_of(view.op.args[3])
    inner = set(first) & set(second) - set(out)
    bias = [(out[-1],)] * (len(view.in_shapes) - 2)
    partial = (P,) * len(bias)
    return (
        *labelled_rows([tuple(first), tuple(second), *bias], [tuple(out)]),
        *(
            Signature((S(first.index(each)), S(second.index(each)), *partial), (P,))
            for each in first
            if each in inner
        ),
        Signature((P, B, *partial), (P,)),
        Signature((B, P, *partial), (P,)),
    )


def multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    equation: str,
    by: Function = lambda kernel, _: kernel,
) -> Tensor:
    """Multiply matrices, one or both transposed, of one row for each of some leading dims.

    equation: as of torch.einsum, one letter a dim; leading dims stand together, as in "btk,nk->btn"
        and "btn,btk->nk".  Dim "c" is multiplied as a multiple of MULTIPLE, with zeros that a view
        cuts off what comes out.
    by: (function, any stride) -> the kernel in its place.
    """
    first, second, out = labels_of(equation)
    sizes = dict(zip(first + second, (*a.shape, *b.shape), strict=True))
    (a, first), (b, second) = _merge_rows(a, first), _merge_rows(b, second)
    a, b = _align(a, first), _align(b, second)
    a = a if first[0] == out[0] else a.t()
    b = b if second[1] == out[-1] else b.t()
    first_of = () if bias is None else (_align(bias, out[-1]),)
    kernel = torch.ops.aten.addmm.default if first_of else torch.ops.aten.mm.default
    product = by(kernel, False)(*first_of, a, b)
    if CLASSES in out:
        product = product.narrow(out.index(CLASSES) and 1, 0, sizes[CLASSES])
    rows = [sizes[each] for each in out[:-1]]
    return product.unflatten(0, rows) if len(rows) > 1 else product  # type: ignore[no-any-return]


def _merge_rows(x: Tensor, labels: str) -> tuple[Tensor, str]:
    return (x.flatten(0, -2), labels[0] + labels[-1]) if len(labels) > 2 else (x, labels)


def _align(x: Tensor, labels: str) -> Tensor:
    dim = labels.find(CLASSES)
    return x if dim < 0 else _pad(x, *(0, 0) * (x.ndim - 1 - dim), 0, -x.shape[dim] % MULTIPLE)


def _pad(x: Tensor, *pad: int) -> Tensor:
    """Add zeros, as F.pad does, which copies even if it adds none."""
    return F.pad(x, pad) if any(pad) else x


# ---- products of 8 bits --------------------------------------------------------------------------


def rows_of_scaled(view: OpView) -> OpRows:
    """Numbers of 8 bits, each row of the first and column of the second with its scale, or all with
    one.
    """
    scales = [("m" if m > 1 else None, "n" if n > 1 else None) for m, n in view.in_shapes[2:4]]
    split = labelled_rows([("m", "k"), ("k", "n"), *scales], [("m", "n")], {"k": P})
    return (*split, *view.partial(("scale_a",), ("scale_b",)))


def _multiply_here(view: LocalView) -> LocalCall:
    given = view.given
    tensors = (given[name] for name in ("self", "mat2", "scale_a", "scale_b"))
    return LocalCall(multiply_scaled, (*tensors, given["out_dtype"]))


def multiply_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply as CUDA wants it: k and n multiples of 16, b column-major, scales dense."""
    (k, n), rowwise = b.shape, scale_a.numel() * scale_b.numel() > 1
    a, b = _pad(a, 0, -k % 16), _pad(b.t(), 0, -k % 16, 0, -n % 16)
    scale_b = _pad(scale_b, 0, -n % 16) if rowwise else scale_b
    operands = (a.contiguous(), b.contiguous().t(), scale_a.contiguous(), scale_b.contiguous())
    return scaled_mm(*operands, out_dtype=dtype).narrow(1, 0, n)  # type: ignore[no-any-return]


# ---- the table -----------------------------------------------------------------------------------


def _flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Count the product of the last two inputs."""
    first, second = in_shapes[-2:]
    return 2.0 * math.prod(first) * second[-1]


def _labelled_flops(op: Op, ins: Sequence[Shape], outs: Sequence[Shape | None]) -> float:
    first, second, _ = labels_of(op.args[3])
    sizes = zip(first + second, (*ins[0], *ins[1]), strict=True)
    return 2.0 * math.prod(dict(sizes).values())


_MATRIX = OpCost(product=ProductKind.MATRIX, flops=_flops)
_LABELLED = replace(_MATRIX, flops=_labelled_flops)
_SCALED = replace(_MATRIX, flops=lambda op, ins, outs: _flops(op, ins[:2], outs))
_BATCHED = OpCost(product=ProductKind.BATCHED, flops=_flops)
_FRESH = (Trait.PRODUCT, Trait.ALLOCATES)

OPS: Mapping[str, OpInfo] = {
    "aten.mm.default": OpInfo(product("mk,kn->mn", "self", "mat2"), traits=_FRESH, cost=_MATRIX),
    "aten.bmm.default": OpInfo(
        product("bmk,bkn->bmn", "self", "mat2"), traits=_FRESH, cost=_BATCHED
    ),
    "aten.matmul.default": OpInfo(  # made by capture/rewrites/batched.py alone
        product("abmk,abkn->abmn", "self", "other"), traits=_FRESH, cost=_BATCHED
    ),
    PRODUCT: OpInfo(rows_of_product, function=multiply, traits=_FRESH, cost=_LABELLED),
    "aten._scaled_mm.default": OpInfo(
        rows_of_scaled, local=_multiply_here, traits=_FRESH, cost=_SCALED
    ),
    "aten.mv.default": OpInfo(product("mk,k->m", "self", "vec")),
    "aten.dot.default": OpInfo(product("k,k->", "self", "tensor")),
    "aten.addmm.default": OpInfo(addmm, traits=_FRESH, cost=replace(_MATRIX, adds_bias=True)),
    "aten.baddbmm.default": OpInfo(addmm, traits=(Trait.PRODUCT,), cost=_BATCHED),
}
