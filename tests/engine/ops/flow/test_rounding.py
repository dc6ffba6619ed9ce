"""bf16 rounded at random: a neighbour, on average the value, the same wherever an element lies."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.ops.flow import rounding
from flowrun.engine.ops.flow.rounding import round_at_random, stream_of, update_narrow
from flowrun.engine.ops.flow.update import adamw, sgd

SEED, STREAM = 5, "w"
ADAMW: dict[str, Any] = {"lr": torch.tensor(0.1), "step": torch.tensor(3.0)}
ADAMW |= {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}


def rounded(x: Tensor, step: float = 1.0, stream: str = STREAM) -> Tensor:
    return round_at_random(x, torch.tensor(step), SEED, stream, tuple(x.shape))


@pytest.mark.parametrize("value", [0.3, -0.3, 1e-30, -7e30])
def test_a_value_becomes_a_neighbour_and_on_average_stays(value: float) -> None:
    x = torch.full((400, 500), value)
    actual = rounded(x).float()
    low, high = actual.unique().tolist()
    assert low < x[0, 0].item() < high
    assert torch.nextafter(torch.tensor(low).bfloat16(), torch.tensor(high).bfloat16()) == high
    spread = (high - low) / x.numel() ** 0.5
    assert float(actual.double().mean()) == pytest.approx(float(x[0, 0]), abs=2 * spread)


def test_what_bf16_has_stays_and_so_do_infinities() -> None:
    kept = torch.cat([torch.randn(1000).bfloat16().float(), torch.tensor([0.0, -0.0, 2e-40])])
    kept = torch.cat([kept.bfloat16().float(), torch.tensor([torch.inf, -torch.inf])])
    assert torch.equal(rounded(kept).float(), kept)
    assert rounded(torch.tensor([torch.nan, -torch.nan])).isnan().all()
    assert rounded(torch.tensor([3.4e38] * 50)).isinf().any()  # above the largest bf16


def test_another_step_and_another_stream_draw_other_numbers() -> None:
    x = torch.rand(1000)
    assert torch.equal(rounded(x), rounded(x))
    assert not torch.equal(rounded(x), rounded(x, step=2.0))
    assert not torch.equal(rounded(x), rounded(x, stream="v"))


def test_each_weight_and_each_of_its_states_draws_numbers_of_its_own() -> None:
    x = torch.rand(1000)
    made = [rounded(x, stream=stream_of(name, k)) for name in ("w", "v") for k in range(3)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(made, 2))


@pytest.mark.parametrize("function", [adamw, sgd])
@pytest.mark.parametrize("piece", [4, 1 << 18])
def test_an_update_is_that_of_fp32_then_rounded(
    function: Callable[..., Any], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces too."""
    monkeypatch.setattr(rounding, "_PIECE", piece)
    numbers = ADAMW if function is adamw else SGD
    tensors = [torch.rand(6, 3).bfloat16() for _ in range(4 if function is adamw else 3)]
    wide = [x.float() for x in tensors]
    function(*wide, **numbers)
    param, _, *states = tensors
    given = {"draw": torch.tensor(1.0), "seed": SEED, "stream": STREAM, "shape": (6, 3)}
    update_narrow(*tensors, optimizer=function.__name__, **given, **numbers)
    for k, (actual, new) in enumerate(zip((param, *states), (wide[0], *wide[2:]), strict=True)):
        assert torch.equal(actual, rounded(new, stream=stream_of(STREAM, k)))


def test_an_update_that_is_left_out_changes_nothing() -> None:
    tensors = [torch.randn(4, 2).bfloat16(), torch.full((4, 2), torch.nan)]
    tensors += [torch.rand(4, 2).bfloat16(), torch.rand(4, 2)]
    before = [x.clone() for x in tensors]
    skip = torch.tensor(True)
    given = {"optimizer": "adamw", "draw": torch.tensor(1.0), "seed": 0, "stream": "w"}
    update_narrow(*tensors, **given, shape=(4, 2), skip=skip, **ADAMW)
    assert all(torch.equal(x, y) for x, y in zip(tensors[::2], before[::2], strict=True))
    assert torch.equal(tensors[3], before[3])


def test_a_scalar_is_updated_too() -> None:
    param, state = torch.tensor(0.5).bfloat16(), torch.tensor(0.0)
    given = {"draw": torch.tensor(1.0), "seed": 0, "stream": "w", "shape": ()}
    update_narrow(param, torch.tensor(1.0), state, optimizer="sgd", **given, **SGD)
    assert state == 1.0 and param.item() == pytest.approx(0.4, rel=0.01)
