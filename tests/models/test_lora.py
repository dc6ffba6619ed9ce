from collections.abc import Callable

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flowrun.models.lora import Lora, add_lora, find_loras, is_linear, tensors_of


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(make(), nn.ReLU())


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 10),
    "linear without bias": lambda: nn.Linear(6, 10, bias=False),
    "Conv1D": lambda: Conv1D(10, 6),
    "square Conv1D": lambda: Conv1D(6, 6),
    "bf16": lambda: nn.Linear(6, 10, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_output_and_gradients_are_those_of_peft(kind: str) -> None:
    ours, theirs = _seeded(MAKERS[kind]), _seeded(MAKERS[kind])
    names = list(ours.state_dict())
    add_lora(ours[0], rank=3, alpha=6.0, dropout=0.0)
    assert [name for name in ours.state_dict() if "lora" not in name] == names
    [(_, lora)] = find_loras(ours)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["0"], fan_in_fan_out="Conv1D" in kind
    )
    wrapped = peft.get_peft_model(theirs, config)
    layer = wrapped.base_model.model[0]
    assert layer.lora_A["default"].weight.dtype == lora.lora_A.weight.dtype
    torch.nn.init.normal_(lora.lora_B.weight)
    for mine, other in ((lora.lora_A, layer.lora_A), (lora.lora_B, layer.lora_B)):
        assert mine.weight.shape == other["default"].weight.shape
        other["default"].weight.data.copy_(mine.weight.data)
    x = torch.randn(4, 6, dtype=lora.weight.dtype)
    assert torch.equal(ours(x), wrapped(x))
    ours(x).square().sum().backward()
    wrapped(x).square().sum().backward()
    assert torch.equal(lora.lora_A.weight.grad, layer.lora_A["default"].weight.grad)
    assert torch.equal(lora.lora_B.weight.grad, layer.lora_B["default"].weight.grad)


def test_nothing_changes_at_first() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    before = linear(x)
    add_lora(linear, rank=2, alpha=1.0, dropout=0.5)
    assert torch.equal(linear(x), before)
    assert bool(linear.lora_A.weight.any())


@pytest.mark.parametrize("make", [MAKERS["linear"], MAKERS["Conv1D"], MAKERS["square Conv1D"]])
def test_a_merged_weight_computes_the_same(make: Callable[[], nn.Module]) -> None:
    model = _seeded(make)
    add_lora(model[0], rank=2, alpha=8.0, dropout=0.0)
    lora = model[0]
    assert isinstance(lora, Lora)
    torch.nn.init.normal_(lora.lora_B.weight)
    plain, x = _seeded(make), torch.randn(3, 6)
    merged = tensors_of("0", lora).merge(lora.weight, lora.lora_A.weight, lora.lora_B.weight)
    plain[0].weight.data.copy_(merged)
    assert torch.allclose(plain(x), model(x), atol=1e-6)


def test_a_linear_that_nobody_calls_is_none() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert not is_linear(attention.out_proj)
    assert not is_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    assert is_linear(nn.Linear(2, 2)) and is_linear(Conv1D(2, 2))
