from typing import Any

import pytest
import torch

from flowrun.engine.ops.flow import update

ADAMW: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adamw"])
def test_an_update_is_that_of_torchs_optimizer_in_every_dtype(
    name: str, dtype: torch.dtype
) -> None:
    """torch's own fused kernel of SGD is wrong in bf16 and fp16 on a CPU."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, dtype=dtype, generator=generator)
    plain, own = torch.nn.Parameter(start.clone()), start.clone()
    momentum = 0.0 if name == "sgd" else 0.9
    given: Any = {"momentum": momentum, "nesterov": name == "nesterov", "weight_decay": 0.01}
    if name == "adamw":
        given = {"eps": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.95)}
    make = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
    optimizer = make([plain], lr=0.1, foreach=False, **given)
    states = [torch.zeros_like(own) for _ in range({"sgd": 0, "adamw": 2}.get(name, 1))]
    for step in range(1, 4):
        grad = torch.randn(100, dtype=dtype, generator=generator)
        plain.grad = grad.clone()
        optimizer.step()
        rate, number = torch.tensor(0.1), torch.tensor(float(step))
        if name == "adamw":
            numbers = ADAMW | {"lr": rate, "eps": 1e-3, "weight_decay": 0.01}
            update.adamw(own, grad, *states, step=number, **numbers)
        else:
            update.sgd(own, grad, *states, lr=rate, **given)
    torch.testing.assert_close(own, plain.detach(), rtol=1e-5, atol=1e-6)
    if name == "adamw":
        torch.testing.assert_close(states[1], optimizer.state[plain]["exp_avg_sq"])


def test_adamw_updates_strided_tensors_alike() -> None:
    grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    dense = [torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(4, 3)]
    around = [torch.full((3, 8), 7.0) for _ in dense]
    strided = [whole[:, ::2].t() for whole in around]
    for x, value in zip(strided, dense, strict=True):
        x.copy_(value)
    update.adamw(dense[0], grad, dense[1], dense[2], step=torch.tensor(1.0), **ADAMW)
    turned = grad.t().contiguous().t()
    update.adamw(strided[0], turned, *strided[1:], step=torch.tensor(1.0), **ADAMW)
    assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))
    assert all(torch.all(whole[:, 1::2] == 7) for whole in around)


def test_updates_are_in_place() -> None:
    param, exp_avg, exp_avg_sq = torch.ones(3), torch.zeros(3), torch.zeros(3)
    result = update.adamw(
        param, torch.ones(3), exp_avg, exp_avg_sq, step=torch.tensor(1.0), **ADAMW
    )
    assert result[0] is param and result[1] is exp_avg and result[2] is exp_avg_sq


def test_sum_of_squares_is_fp32() -> None:
    assert update.sumsq(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.float32


def test_where_skip_is_true_nothing_changes() -> None:
    yes = torch.tensor(True)
    old = [torch.full((3,), float(k)) for k in range(1, 4)]
    kept = [x.clone() for x in old]
    grad = torch.full((3,), torch.inf)
    update.adamw(kept[0], grad, kept[1], kept[2], step=torch.tensor(1.0), skip=yes, **ADAMW)
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5, "nesterov": False}
    update.sgd(kept[0], grad, kept[1], skip=yes, **sgd)
    update.assign(kept, [x * torch.inf for x in kept], skip=yes)
    assert all(torch.equal(a, b) for a, b in zip(kept, old, strict=True))


def test_what_is_assigned_may_be_another_of_the_old_tensors() -> None:
    one, two = torch.ones(3), torch.full((3,), 2.0)
    update.assign((one, two), (two, one))
    assert torch.equal(one, torch.full((3,), 2.0)) and torch.equal(two, torch.ones(3))


@pytest.mark.parametrize("shape", [(7,), (300, 300)], ids=str)
def test_many_updated_at_once_are_what_each_alone_is(shape: tuple[int, ...]) -> None:
    draws = torch.Generator().manual_seed(1)
    # weight, gradient, two states
    each = [tuple(torch.rand(*shape, generator=draws) for _ in range(4)) for _ in range(3)]
    numbers = {"step": torch.tensor(2.0), "coefficient": torch.tensor(0.5), **ADAMW}
    alone = [tuple(x.clone() for x in given) for given in each]
    update.adamw_of_many(each, **numbers)
    for given in alone:
        update.adamw(*given, **numbers)
    for one, other in zip(each, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
