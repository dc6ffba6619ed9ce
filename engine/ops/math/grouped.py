"""Signatures and local programs of grouped matrix products: experts of a mixture, stacked.

input (tokens, in), sorted by expert; weight (experts, in, out); offs (experts,): where the tokens
of each expert end.  Split experts are expert parallelism: each rank multiplies the tokens of its
own experts, zeros stand for the others, and the sum is the whole (P).  Of split tokens every rank
finds its part of each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpCost, OpInfo, Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import LocalCall, LocalView, OpRows, OpView
from flowrun.engine.torch_internals import FakeTensor


def forward(view: OpView) -> OpRows:
    """(input, weight, offs) -> (tokens, out)."""
    return (
        view.row({"input": S(0)}, S(0)),
        view.row({"weight": S(0)}, P),
        view.row({"input": S(1), "weight": S(1)}, P),
        view.row({"weight": S(2)}, S(1)),
        *view.partial(("input",), ("weight",)),
    )


def backward(view: OpView) -> OpRows:
    """(input, weight, offs, grad_output) -> gradients of (input, weight)."""
    return (
        view.row({"input": S(0), "grad_output": S(0)}, S(0), P),
        view.row({"weight": S(0)}, P, S(0)),
        view.row({"input": S(1), "weight": S(1)}, S(1), S(1)),
        view.row({"weight": S(2), "grad_output": S(1)}, P, S(2)),
        view.row({"grad_output": P}, P),
        view.row({"input": P}, B, P),
        view.row({"weight": P}, P, B),
        view.row({"input": P, "weight": P}, P),
    )


# ---- local programs: experts from `expert` on, tokens from `token` on ----------------------------


def _groups(
    offs: torch.Tensor, expert: int, experts: int, token: int, tokens: int
) -> Iterator[tuple[int, slice]]:
    """(expert, its tokens), both counted from what is here, where any are here; none of a tensor
    without values.
    """
    is_only_a_shape = isinstance(offs, FakeTensor) and offs.fake_mode.shape_env is None
    ends = [0] * len(offs) if is_only_a_shape else offs.tolist()
    for k in range(expert, expert + experts):
        start, end = (ends[k - 1] if k else 0) - token, ends[k] - token
        here = slice(max(start, 0), min(end, tokens))
        if here.start < here.stop:
            yield k - expert, here


def product(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, expert: int, token: int
) -> torch.Tensor:
    """Multiply each token of `x` by the weight of its expert; zeros where that is not here.

    offs: where the tokens of each expert end.
    expert, token: numbers of the first expert and the first token that are here.
    """
    out = x.new_zeros(len(x), weight.shape[2])
    for k, tokens in _groups(offs, expert, len(weight), token, len(x)):
        out[tokens] = x[tokens] @ weight[k]
    return out


def gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    grad: torch.Tensor,
    expert: int,
    token: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the input and the weight that are here.

    x, weight, grad: what is here of input, weight and the output's gradient.
    offs, expert, token: as of product.
    """
    grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for k, tokens in _groups(offs, expert, len(weight), token, len(x)):
        grad_x[tokens] = grad[tokens] @ weight[k].T
        grad_weight[k] = x[tokens].T @ grad[tokens]
    return grad_x, grad_weight


def local(view: LocalView) -> LocalCall:
    """The op itself where all experts and all tokens are here."""
    (token, tokens), (expert, experts) = view.in_slices[0][0], view.in_slices[1][0]
    if (tokens, experts) == (view.in_shapes[0][0], view.in_shapes[1][0]):
        return view.rebind()
    program = gradients if "backward" in view.op.target else product
    return LocalCall(program, (*view.op.args, expert, token))


def _flops(op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    """Count as if each expert had as many tokens."""
    tokens, (experts, _, wide), (of_all,) = in_shapes[:3]
    wanted = sum(shape is not None for shape in out_shapes)
    return 2.0 * wanted * math.prod(tokens) * wide * experts / of_all


GROUPED = "transformers.grouped_mm_fallback.default"
GROUPED_BACKWARD = "transformers.grouped_mm_fallback_backward.default"

_COST = OpCost(flops=_flops)
OPS: Mapping[str, OpInfo] = {
    GROUPED: OpInfo(forward, local=local, traits=(Trait.PRODUCT, Trait.PLAIN), cost=_COST),
    GROUPED_BACKWARD: OpInfo(backward, local=local, traits=(Trait.PLAIN,), cost=_COST),
}
