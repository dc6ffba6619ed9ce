from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.capture.node_reader import MOST_NUMBERS
from flowrun.engine.errors import RecipeError

Hook = Callable[[Tensor], Any]


def capture_of(model: nn.Module) -> Any:
    loss: Any = lambda output, batch: output.mean()  # noqa: E731
    return capture(Task(model, {"input": "x"}, loss), {"x": torch.ones(3, 4)})


def capture_with(hook: Hook, width: int = 4) -> Any:
    """A layer with a hook on its weight."""
    model = nn.Sequential(nn.Linear(4, width), nn.Flatten(0))
    model[0].weight.register_hook(hook)
    return capture_of(model)


def branches(gradient: Tensor) -> Tensor:
    return gradient if gradient.norm() > 1 else 2 * gradient


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (branches, "torch could not trace it"),
        (lambda gradient: gradient.sum(), "it returns torch.float32 of shape "),
    ],
)
def test_a_hook_that_cannot_be_followed_is_refused_by_name(hook: Hook, why: str) -> None:
    with pytest.raises(RecipeError, match=why) as error:
        capture_with(hook)
    assert "the gradient of 0.weight (test_gradient_hooks.py:" in error.value.problem


def test_a_hook_with_a_large_tensor_from_outside_is_refused_with_what_to_write() -> None:
    width = MOST_NUMBERS // 4 + 1
    mask = torch.randn(width, 4)
    with pytest.raises(RecipeError, match="Register it as a buffer of the module"):
        capture_with(lambda gradient: gradient * mask, width)


def test_a_hook_of_a_frozen_parameter_is_never_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Flatten(0))
    model[0].weight.register_hook(branches)
    model[0].weight.requires_grad_(False)
    assert "grad/0.weight" not in dict(capture_of(model).results)
