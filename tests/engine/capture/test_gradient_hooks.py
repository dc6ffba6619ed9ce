from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.capture.node_reader import MOST_NUMBERS
from flowrun.engine.errors import RecipeError
from support.layouts.grids import Layout, virtual_run
from support.layouts.plain_loop import classifier, micro_batch_loop, pins

Hook = Callable[[Tensor], Any]


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.001, 0.001)


def normalized(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-6)


def in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


class Hooked(nn.Module):
    """Hooks of many kinds: one that masks rows, two on one parameter, one that reads a buffer and
    one that reads its own parameter.
    """

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(64, 12), nn.Linear(12, 10)
        self.register_buffer("kept", (torch.arange(12) < 6).float())
        mask = torch.zeros(12, 64)
        mask[6:] = 1
        self.hidden.weight.register_hook(lambda gradient: gradient * mask)
        self.hidden.bias.register_hook(lambda gradient: gradient * self.kept)
        self.output.weight.register_hook(clipped)
        self.output.weight.register_hook(normalized)
        weight = self.output.bias
        weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())
        self.output.bias.register_hook(in_place)

    def forward(self, x_BI: Tensor) -> Tensor:
        out: Tensor = self.output(torch.tanh(self.hidden(x_BI)))
        return out


HOOKED = classifier(Hooked, "x_BI", pins({"hidden.*": 0}), micro_batches=2)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(data=2),
        Layout(tensor=2),
        Layout(stages=2),
        Layout(data=2, zero=2),
        Layout(data=2, zero=3),
    ],
    ids=str,
)
def test_hooks_change_the_gradient_of_each_micro_batch(layout: Layout) -> None:
    losses, state = micro_batch_loop(HOOKED, 3)
    run = virtual_run(HOOKED, layout, 3)
    assert run.losses == pytest.approx(losses, rel=1e-5)
    for name, value in run.weights.items():
        torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-6)


def capture_with(hook: Hook, width: int = 4) -> Any:
    """A layer with a hook on its weight."""
    model = nn.Sequential(nn.Linear(4, width), nn.Flatten(0))
    model[0].weight.register_hook(hook)
    loss: Any = lambda output, batch: output.mean()  # noqa: E731
    return capture(Task(model, {"input": "x"}, loss), {"x": torch.ones(3, 4)})


def branches(gradient: Tensor) -> Tensor:
    return gradient if gradient.norm() > 1 else 2 * gradient


def wrong_shape(gradient: Tensor) -> Tensor:
    return gradient.sum()


@pytest.mark.parametrize(
    ("hook", "why"),
    [(branches, "torch could not trace it"), (wrong_shape, "it returns torch.float32 of shape ")],
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
    loss: Any = lambda output, batch: output.mean()  # noqa: E731
    graph = capture(Task(model, {"input": "x"}, loss), {"x": torch.ones(3, 4)})
    assert "grad/0.weight" not in dict(graph.results)
