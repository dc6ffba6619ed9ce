import pytest
import torch
from torch import Tensor

from flowrun.engine.ops.nn.expert_op import ACTIVATIONS, mix_experts

TOKENS, WIDTH, EXPERTS, CHOICES, INNER, OUT = 7, 4, 5, 2, 6, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_()


def drawn(gated: bool) -> tuple[Tensor, ...]:
    """Draw x, chosen, share, matrices; the last expert is chosen by nobody."""
    chosen = draw(TOKENS, EXPERTS - 1).topk(CHOICES).indices
    inside = [draw(EXPERTS, WIDTH, INNER, seed=k) for k in range(1 + gated)]
    down = draw(EXPERTS, INNER, OUT, seed=3)
    return draw(TOKENS, WIDTH), chosen, draw(TOKENS, CHOICES, seed=4), *inside, down


def dense(x: Tensor, chosen: Tensor, share: Tensor, *matrices: Tensor, act: str) -> Tensor:
    """Let every expert multiply every token."""
    made = [torch.einsum("nd,edf->nef", x, weight) for weight in matrices[:-1]]
    hidden = ACTIVATIONS[act][0](made[0])
    hidden = hidden * made[1] if made[1:] else hidden
    weight = x.new_zeros(TOKENS, EXPERTS).scatter(1, chosen, share)
    return torch.einsum("ne,nef,efo->no", weight, hidden, matrices[-1])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_it_is_a_dense_computation_of_the_same_routes(act: str, gated: bool) -> None:
    x, chosen, *rest = drawn(gated)
    one, other = (function(x, chosen, *rest, act=act) for function in (mix_experts, dense))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad((y * draw(TOKENS, OUT)).sum(), [x, *rest]) for y in (one, other))
    for of_one, of_other in zip(*grads, strict=True):
        torch.testing.assert_close(of_one, of_other, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.library.opcheck, from 2.14 on
@pytest.mark.parametrize("gated", [False, True])
def test_torch_is_told_what_it_makes(gated: bool) -> None:
    op = torch.ops.flowrun.gated_experts if gated else torch.ops.flowrun.experts
    x, chosen, share, *matrices = drawn(gated)
    torch.library.opcheck(op.default, (x, chosen, share, "silu", EXPERTS, *matrices))


def test_products_are_narrow_under_autocast_and_weights_of_tokens_stay_wide() -> None:
    x, chosen, *rest = (each.float() if each.is_floating_point() else each for each in drawn(True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = mix_experts(x, chosen, *rest, act="silu")
    assert narrow.dtype == torch.bfloat16
    whole = mix_experts(x, chosen, *rest, act="silu")
    torch.testing.assert_close(narrow.float(), whole, rtol=0.1, atol=0.1)
