"""Signatures, local programs and cost of experts that leave no token out (nn/expert_op.py).

Split experts are expert parallelism: each rank takes the tokens that chose one of its own, and the
sum over ranks is the whole (P); or tokens are split, too, and travel (routed.py).  Split tokens
need no word with each other.  Each expert may be
split inside, too (columns of gate and up, rows of down).  Not the width of tokens: the activation
is of whole sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from flowrun.engine.ir.expansion import Expansion
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import Expands, OpCost, OpInfo, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P
from flowrun.engine.ir.signature import (
    Function,
    Local,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Rule,
    labelled_rows,
    places,
    torch_callable,
)
from flowrun.engine.ops.experts import routed
from flowrun.engine.ops.nn import expert_op

_DIMS = {  # n tokens, k choices, e experts, f their width, o out; the width of tokens is whole
    **{"x": ("n", None), "chosen": ("n", "k"), "share": ("n", "k"), "grad": ("n", "o")},
    **{"gate": ("e", None, "f"), "up": ("e", None, "f"), "down": ("e", "f", "o")},
}
_SUMS = dict.fromkeys("nkefo", P)


def forward(view: OpView) -> OpRows:
    """Linear in the shares, in down, and in up where a gate has the activation."""
    split = labelled_rows([_DIMS[name] for name in places(view.op)], [("n", "o")], _SUMS)
    up = [("up",)] if "gate" in places(view.op) else []
    return (*split, *view.partial(("share",), ("down",), *up), *routed.routed_row(view))


def backward(view: OpView) -> OpRows:
    """Gradients of x, share and the matrices: each is linear in what the output is linear in, but
    for the gradient of that itself, which does not depend on it.
    """
    names = places(view.op)
    of = [name for name in names if name not in ("grad", "chosen")]
    split = labelled_rows([_DIMS[name] for name in names], [_DIMS[name] for name in of], _SUMS)
    linear = ["share", "down", *(["up"] if "gate" in names else [])]
    of_one = (view.row({one: P}, *(B if name == one else P for name in of)) for one in linear)
    return (*split, view.row({"grad": P}, P), *of_one, *routed.routed_row(view))


def on_a_rank(program: Function) -> Local:
    """Return the local program: a rank knows which experts are its own."""

    def local(view: LocalView) -> LocalCall:
        first, experts = view.in_slices[-1][0]
        if experts == view.in_shapes[-1][0]:
            return LocalCall(torch_callable(view.op.target), view.op.args)
        return LocalCall(program, view.op.args, (("first", first),))

    return local


def _flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Count products of chosen experts alone; backward makes those before the activation again."""
    *inside, (_, inner, out) = _matrices(in_shapes)
    before, after = sum(width for _, width, _ in inside), out
    products = 3 * before + 2 * after if _is_backward(op) else before + after
    return 2.0 * _pairs_here(op, in_shapes) * inner * products


# dims as wide as an expert that are there at once, for each pair: forward and backward, by whether
# there is a gate
_WIDE = {False: (2, 4), True: (4, 7)}


def _held_bytes(op: Op, in_shapes: Sequence[Shape], itemsize: int) -> int:
    """Return bytes of what all pairs make, in fp32, with their order, and of what one expert
    multiplies at once.
    """
    *inside, (_, inner, out) = _matrices(in_shapes)
    backward, width = _is_backward(op), inside[0][1]
    pairs = math.prod(in_shapes[1 + backward])
    of_all = pairs * ((width * itemsize if backward else out * max(itemsize, 4)) + 2 * 8)
    wide = _WIDE[len(inside) > 1][backward] * inner
    at_once = min(expert_op.most_at_once(pairs, _experts(op, in_shapes)), pairs)
    return of_all + at_once * (width + out + wide) * itemsize


def _pairs_here(op: Op, in_shapes: Sequence[Shape]) -> float:
    """Count pairs of a token and a choice that is here, as if each expert were chosen as often."""
    here, experts = _matrices(in_shapes)[-1][0], _experts(op, in_shapes)
    routes = routed.routes_of(op)
    filled = routes.pairs / (routes.ranks * routes.slots) if routes else 1.0
    return filled * math.prod(in_shapes[1 + _is_backward(op)]) * here / experts


def _experts(op: Op, in_shapes: Sequence[Shape]) -> int:
    """Return the number of all experts that what is here may choose."""
    routes = routed.routes_of(op)
    return routes.of_piece(in_shapes[0]).experts if routes else routed.count_experts(op)


def _matrices(in_shapes: Sequence[Shape]) -> list[Shape]:
    return [shape for shape in in_shapes if len(shape) == 3]


def _is_backward(op: Op) -> bool:
    return "_backward" in op.target


_COST = OpCost(flops=_flops, held_bytes=_held_bytes)


def _known(
    rule: Rule, program: Function, expand: Callable[[Expansion], None], *traits: Trait
) -> OpInfo:
    return OpInfo(
        rule,
        local=on_a_rank(program),
        traits=(*traits, Trait.PLAIN),
        cost=_COST,
        expands=Expands("x", routed.routing_dims, expand),
    )


def _describe_routed(program: Function, *traits: Trait) -> OpInfo:
    rule, local = routed.rows_of_run, routed.on_a_rank(program)
    traits = (*traits, Trait.PLAIN)
    return OpInfo(rule, function=program, local=local, traits=traits, cost=_COST)


_FORWARD = _known(forward, expert_op.run, routed.expand_forward, Trait.PRODUCT)
_BACKWARD = _known(backward, expert_op.run_backward, routed.expand_backward)
OPS: Mapping[str, OpInfo] = {
    **{
        f"flowrun.{name}{end}.default": known
        for name in ("experts", "gated_experts")
        for end, known in (("", _FORWARD), ("_backward", _BACKWARD))
    },
    routed.FIND: OpInfo(routed.rows_of_slots, function=routed.find_slots, traits=(Trait.PLAIN,)),
    routed.SEND: OpInfo(
        routed.rows_of_send, function=routed.send, local=routed.on_a_rank(routed.send)
    ),
    routed.TAKE: OpInfo(routed.rows_of_take, function=routed.take),
    **dict.fromkeys((routed.RUN, routed.GATED), _describe_routed(routed.run, Trait.PRODUCT)),
    **dict.fromkeys(
        (routed.RUN_BACKWARD, routed.GATED_BACKWARD), _describe_routed(routed.run_backward)
    ),
}
