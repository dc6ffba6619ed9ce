"""Signatures of matrix products.

Two dims meet in a product: a dim that both operands have and the output lacks is contracted, and
its split gives P. A product is linear in each operand, not in both at once: "P,P -> P" would lose
the cross terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpCost, OpInfo, ProductKind, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import P, S
from flowrun.engine.ir.signature import Labels, OpRows, OpView, Rule, labelled_rows


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


def _flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Count the product of the last two inputs."""
    first, second = in_shapes[-2:]
    return 2.0 * math.prod(first) * second[-1]


_MATRIX = OpCost(product=ProductKind.MATRIX, flops=_flops)
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
    "aten.mv.default": OpInfo(product("mk,k->m", "self", "vec")),
    "aten.dot.default": OpInfo(product("k,k->", "self", "tensor")),
    "aten.addmm.default": OpInfo(addmm, traits=_FRESH, cost=replace(_MATRIX, adds_bias=True)),
    "aten.baddbmm.default": OpInfo(addmm, traits=(Trait.PRODUCT,), cost=_BATCHED),
}
