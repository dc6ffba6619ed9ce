from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.patches.routed_experts import replace_experts
from support.nets.transformers_models import TRANSFORMERS

ALIKE = ("mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "granite_moe")


def made(name: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a model whose experts are called one after the other, and a batch."""
    training = TRANSFORMERS[name].training()
    model: Any = training.model()
    model.set_experts_implementation("eager")
    return model, dict(training.batches[0])


def loss_and_gradients(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    loss = model(**batch).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if hasattr(part, "gate_up_proj")]


@pytest.mark.parametrize("name", ALIKE)
def test_experts_of_transformers_are_what_one_op_makes(name: str) -> None:
    model, batch = made(name)
    theirs = loss_and_gradients(model, batch)
    forward = type(experts_of(model)[0]).forward
    with replace_experts(model.modules()):
        assert type(experts_of(model)[0]).forward is not forward
        ours = loss_and_gradients(model, batch)
    for one, other in zip(ours, theirs, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_has_its_own_experts_again() -> None:
    model, _ = made("mixtral")
    (experts,) = experts_of(model)
    before = type(experts).forward, dict(vars(experts))
    with replace_experts(model.modules()):
        pass
    assert (type(experts).forward, dict(vars(experts))) == before


def biased(experts: Any) -> None:
    experts.has_bias = True


def of_another_act(experts: Any) -> None:
    experts.act_fn = nn.Softplus()


def of_more_weights(experts: Any) -> None:
    experts.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("change", [biased, of_another_act, of_more_weights])
def test_experts_of_another_form_stay_as_they_are(change: Callable[[Any], None]) -> None:
    model, _ = made("mixtral")
    (experts,) = experts_of(model)
    change(experts)
    forward = type(experts).forward
    with replace_experts(model.modules()):
        assert type(experts).forward is forward


def test_interleaved_experts_with_biases_stay_as_they_are() -> None:
    model, _ = made("gpt_oss")
    forward = type(experts_of(model)[0]).forward
    with replace_experts(model.modules()):
        assert type(experts_of(model)[0]).forward is forward
