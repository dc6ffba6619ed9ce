"""The ops of torch that send each token to the experts that it chooses, however many choose one.

x (tokens, width); chosen and share (tokens, choices): the number of an expert, and the weight of
what it makes.  Of an expert's matrices, stacked as (experts, in, out), `down` comes last:

    experts         act(x @ up) @ down
    gated_experts   (act(x @ gate) * (x @ up)) @ down

Pairs of a token and a choice are sorted by expert, and each expert multiplies its own: there is no
capacity, nothing is padded, and no token is left out.  Backward makes the products before `act`
once more, so that nothing is kept whose size depends on who chooses what.

It knows nothing of the engine: models call it, also in plain torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flowrun.engine.ops.nn.document_op import as_autocast
from flowrun.engine.torch_internals import FakeTensor

_aten = torch.ops.aten
ACTIVATIONS: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gelu": (F.gelu, _aten.gelu_backward.default),  # and its (gradient, input) -> gradient
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(_aten.gelu_backward.default, approximate="tanh"),
    ),
    "relu": (F.relu, lambda grad, x: _aten.threshold_backward.default(grad, x, 0)),
    "silu": (F.silu, _aten.silu_backward.default),
}
EXPERTS, GATED = "flowrun::experts", "flowrun::gated_experts"
_MATRICES = {EXPERTS: "Tensor up, Tensor down", GATED: "Tensor gate, Tensor up, Tensor down"}


def mix_experts(x: Tensor, chosen: Tensor, share: Tensor, *matrices: Tensor, act: str) -> Tensor:
    """Return the sum over its choices of what the experts of a token make: (tokens, out).

    matrices: [gate,] up, down.  act: a name of ACTIVATIONS.  Under autocast, products have its
    dtype.
    """
    op = torch.ops.flowrun.experts if len(matrices) == 2 else torch.ops.flowrun.gated_experts
    given = as_autocast(x), chosen, share, act, len(matrices[0])
    made: Tensor = op(*given, *map(as_autocast, matrices))
    return made


def run(
    x: Tensor,
    chosen: Tensor,
    share: Tensor,
    act: str,
    experts: int,
    *matrices: Tensor,
    first: int = 0,
) -> Tensor:
    """Return what the experts that are here add to the output.

    experts: how many there are.  matrices: of those that are here.  first: number of the first one.
    """
    *inside, down = matrices
    wide = torch.promote_types(x.dtype, share.dtype)
    pairs = x.new_zeros(chosen.numel(), down.shape[2], dtype=wide)
    for k, here in _pairs(chosen, experts, first, len(down)):
        x_k, weights = x[here // chosen.shape[1]], [w[k] for w in inside]
        made_k = _hidden(x_k, weights, act)[0] @ down[k]
        pairs[here] = made_k * share.flatten()[here, None]
    made: Tensor = _sum_choices(pairs, chosen).to(x.dtype)
    return made


def run_backward(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    share: Tensor,
    act: str,
    experts: int,
    *matrices: Tensor,
    first: int = 0,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, share and the matrices that are here.

    grad: of the output.  act, experts, matrices, first: as of `run`.
    """
    of_pairs, of_share = x.new_zeros(chosen.numel(), x.shape[1]), torch.zeros_like(share).flatten()
    sums = [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in matrices]
    for k, here in _pairs(chosen, experts, first, len(sums[0])):
        tokens, of_k = here // chosen.shape[1], [each[k] for each in sums]
        given = x[tokens], grad[tokens], share.flatten()[here, None], [w[k] for w in matrices]
        of_pairs[here], of_share[here] = _add_gradients(*given, of_k, act)
    return _sum_choices(of_pairs, chosen), of_share.view(share.shape), *sums


def _add_gradients(
    x: Tensor, grad: Tensor, share: Tensor, matrices: list[Tensor], sums: list[Tensor], act: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of what an expert reads and of its shares; add those of its matrices.

    sums: of each matrix.
    """
    *inside, down = matrices
    run_act, slope = ACTIVATIONS[act]
    hidden, made = _hidden(x, inside, act)
    of_hidden = grad @ down.T
    of_share = (of_hidden * hidden).sum(1).to(share.dtype)
    sums[-1].addmm_((hidden * share).to(x.dtype).T, grad)
    of_hidden = (of_hidden * share).to(x.dtype)
    of_made = [slope(of_hidden * made[1] if made[1:] else of_hidden, made[0])]
    of_made += [of_hidden * run_act(made[0])] * len(made[1:])
    of_x = torch.zeros_like(x)
    for of_each, weight, of_weight in zip(of_made, inside, sums, strict=False):
        of_weight.addmm_(x.T, of_each)
        of_x.addmm_(of_each, weight.T)
    return of_x, of_share


def _pairs(chosen: Tensor, experts: int, first: int, here: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (an expert, counted from the first one here, pairs that chose it), if any did; none of
    a tensor without values.

    No more at once than 5/4 of an even share, so that what is made of them is bounded.
    """
    if is_only_a_shape(chosen):
        return
    most = most_at_once(chosen.numel(), experts)
    numbers, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(numbers, torch.arange(first, first + here + 1).to(numbers)).tolist()
    for k, (start, end) in enumerate(itertools.pairwise(ends)):
        for part in range(start, end, most):
            yield k, order[part : min(part + most, end)]


def is_only_a_shape(value: Tensor) -> bool:
    """Return whether a tensor has no values, as only the shape of what is made of it is asked for.

    Where code is built of it, sizes are symbols, and reading a value raises.
    """
    return isinstance(value, FakeTensor) and value.fake_mode.shape_env is None


def most_at_once(pairs: int, experts: int) -> int:
    """Return how many of all pairs an expert multiplies at once, at most."""
    return -(-5 * pairs // (4 * experts))


def _hidden(x: Tensor, weights: list[Tensor], act: str) -> tuple[Tensor, list[Tensor]]:
    """Return what `down` multiplies, and the products before the activation."""
    made = [x @ weight for weight in weights]
    hidden = ACTIVATIONS[act][0](made[0])
    return (hidden * made[1] if made[1:] else hidden), made


def _sum_choices(pairs: Tensor, chosen: Tensor) -> Tensor:
    return pairs.view(*chosen.shape, -1).sum(1)


# ---- for torch -----------------------------------------------------------------------------------


class _Context(FunctionCtx):
    """What autograd keeps of a call."""

    saved_tensors: tuple[Tensor, ...]
    numbers: tuple[str, int]


def _save(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor, str, int, *tuple[Tensor, ...]],
    output: Tensor,
) -> None:
    x, chosen, share, act, experts, *matrices = inputs
    ctx.numbers = act, experts
    ctx.save_for_backward(x, chosen, share, *matrices)


def _backward(name: str, ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    run_op = getattr(torch.ops.flowrun, f"{name.partition('::')[2]}_backward")
    routed, matrices = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    of_x, of_share, *of_matrices = run_op(grad, *routed, *ctx.numbers, *matrices)
    return of_x, None, of_share, None, None, *of_matrices


for _name, _matrices in _MATRICES.items():
    _given = f"Tensor x, Tensor chosen, Tensor share, str act, int experts, {_matrices}"
    _made = ", ".join(["Tensor"] * (3 + _matrices.count(",")))
    _of_backward = f"(Tensor grad, {_given}) -> ({_made})"
    torch.library.custom_op(_name, run, mutates_args=(), schema=f"({_given}) -> Tensor")
    torch.library.register_fake(_name, lambda x, *rest: x.new_empty(len(x), rest[-1].shape[2]))
    torch.library.register_autograd(_name, partial(_backward, _name), setup_context=_save)
    torch.library.custom_op(f"{_name}_backward", run_backward, mutates_args=(), schema=_of_backward)
    torch.library.register_fake(
        f"{_name}_backward",
        lambda _, x, *rest: tuple(
            x.new_empty(like.shape, dtype=like.dtype) for like in (x, rest[1], *rest[4:])
        ),
    )
