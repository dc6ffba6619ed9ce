import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flowrun.models.losses import cross_entropy, routed_cross_entropy
from flowrun.models.metrics import accuracy
from flowrun.models.moe import DroplessMixture, Mixture, MixtureGPT, Routed, Router


def seeded_mixture(room: float, chosen: int = 2) -> Mixture:
    torch.manual_seed(0)
    return Mixture(width=8, experts=4, chosen=chosen, room=room)


def token_by_token(mixture: Mixture, x_BTD: Tensor) -> Tensor:
    """What the mixture makes of each token, one after the other."""
    router, experts = mixture.router, mixture.experts
    slots = router.slots(x_BTD.shape[1])
    out = torch.zeros_like(x_BTD)
    for b, x_TD in enumerate(x_BTD):
        share_TK, expert_TK = router.score(x_TD).softmax(-1).topk(router.chosen)
        used = [0] * router.experts
        for k in range(router.chosen):
            for t, x_D in enumerate(x_TD):
                e = int(expert_TK[t, k])
                used[e] += 1
                if used[e] <= slots:
                    y_D = F.gelu(x_D @ experts.up[e]) @ experts.down[e]
                    of = share_TK[t].sum() if router.chosen > 1 else 1.0
                    out[b, t] += share_TK[t, k] / of * y_D
    return out


@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("room", [0.5, 1.25, 4.0])
def test_a_mixture_is_each_token_through_its_experts(room: float, chosen: int) -> None:
    mixture, x_BTD = seeded_mixture(room, chosen), torch.randn(3, 10, 8)
    torch.testing.assert_close(mixture(x_BTD)[0], token_by_token(mixture, x_BTD))


def test_a_router_of_one_expert_learns_from_the_loss() -> None:
    mixture = seeded_mixture(4.0, 1)
    mixture(torch.randn(3, 10, 8))[0].square().sum().backward()
    assert mixture.router.score.weight.grad.abs().sum() > 0


def test_who_finds_no_slot_is_left_out() -> None:
    mixture = seeded_mixture(room=0.5, chosen=1)
    with torch.no_grad():
        mixture.router.score.weight.zero_()[2] = 1.0
    x_BTD = torch.rand(1, 16, 8) + 0.1  # all choose expert 2, which has 2 slots
    y_TD = mixture(x_BTD)[0][0]
    assert (y_TD.abs().sum(-1) > 0).tolist() == [True, True] + [False] * 14


def test_what_a_token_gets_does_not_depend_on_other_samples() -> None:
    mixture, x_BTD = seeded_mixture(room=0.5), torch.randn(4, 10, 8)
    parts = torch.cat([mixture(x_BTD[:2])[0], mixture(x_BTD[2:])[0]])
    torch.testing.assert_close(mixture(x_BTD)[0], parts)


def test_the_balance_is_one_where_likelihoods_are_alike_and_all_experts_where_one_gets_all() -> (
    None
):
    router = Router(width=8, experts=4, chosen=1, room=1.0)
    with torch.no_grad():
        router.score.weight.zero_()
        alike = router(torch.ones(2, 6, 8))[1]
        router.score.weight[3] = 100.0
        one = router(torch.ones(2, 6, 8))[1]
    assert (alike.item(), one.item()) == (1.0, 4.0)


def test_the_loss_adds_a_share_of_the_balance() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    output, batch = Routed(logits, torch.tensor(3.0)), {"targets": targets}
    expected = cross_entropy(logits, batch) + 0.1 * 3.0
    torch.testing.assert_close(routed_cross_entropy(output, batch, balance=0.1), expected)
    assert accuracy(output, batch).item() == accuracy(logits, batch).item()


def one_sided(speed: float, shared: bool = False) -> DroplessMixture:
    """Return a mixture of whose 4 experts all tokens find the last two the likeliest."""
    torch.manual_seed(0)
    mixture = DroplessMixture(width=8, experts=4, chosen=2, speed=speed, shared=shared)
    with torch.no_grad():
        mixture.router.score.weight[2:] += 0.5
    return mixture


def test_a_bias_brings_tokens_to_experts_that_are_rarely_chosen() -> None:
    mixture, x_BTD = one_sided(speed=0.001), torch.randn(4, 16, 8) + 0.5
    loads = [mixture.router(x_BTD)[0].flatten().bincount(minlength=4) for _ in range(300)]
    assert loads[0].max() >= 56  # of 64 tokens
    assert loads[-1].max() <= 34  # 32 are an even share
    frozen = mixture.eval().router.bias.clone()
    mixture.router(x_BTD)
    assert mixture.router.bias.equal(frozen)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    mixture, x_BTD = one_sided(speed=0.01), torch.rand(2, 5, 8)
    with torch.no_grad():
        mixture.router.bias[:2] = 9.0
    expert_BTK, share_BTK, _ = mixture.eval().router(x_BTD)
    assert (expert_BTK < 2).all()
    likely_BTE = mixture.router.score(x_BTD).softmax(-1)
    two_BTK = likely_BTE.gather(-1, expert_BTK)
    torch.testing.assert_close(share_BTK, two_BTK / two_BTK.sum(-1, keepdim=True))


def test_a_shared_expert_is_added_for_all_tokens() -> None:
    mixture, x_BTD = one_sided(0.0, shared=True), torch.rand(2, 5, 8)
    assert mixture.shared is not None
    both, one = mixture(x_BTD)[0], mixture.shared(x_BTD)
    mixture.shared = None
    torch.testing.assert_close(both, mixture(x_BTD)[0] + one)


def test_with_room_for_all_tokens_a_capacity_changes_nothing() -> None:
    bounded, dropless = seeded_mixture(room=2.0), one_sided(0.0)
    dropless.load_state_dict(bounded.state_dict())
    x_BTD = torch.rand(3, 10, 8)
    for one, other in zip(bounded(x_BTD), dropless(x_BTD), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"depth": 1, "experts": 2}, "the second block is the first mixture"),
        ({"depth": 2, "experts": 2, "chosen": 3}, "3 of 2 experts"),
        ({"depth": 2, "experts": 2, "shared": True}, "without capacity: write room null"),
    ],
)
def test_sizes_that_make_no_mixture_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MixtureGPT(vocabulary=11, context=6, heads=2, width=8, **sizes)  # type: ignore[arg-type]
