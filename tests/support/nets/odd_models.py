"""Small models with something unusual in them, trained in a layout and by a plain torch loop.

A model takes fields of the batch by the names of forward's arguments; by default it makes 8 logits
of vectors of 16 numbers.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import Optimizer, Pin
from support.layouts.grids import Layout, virtual_run
from support.layouts.plain_loop import Batch, Measure, Training, micro_batch_loop, seeded, sgd

STEPS, SAMPLES = 3, 8
WIDTH, CLASSES, VOCABULARY, CONTEXT = 16, 8, 32, 6
SGD = sgd(0.1, 0.9)
SINGLE, DATA, TENSOR = Layout(), Layout(data=2), Layout(tensor=2)
STAGES, ZERO = Layout(stages=2), Layout(data=2, zero=3)


def vectors() -> tuple[Batch, ...]:
    g = torch.Generator().manual_seed(1)
    return tuple(
        {
            "x": torch.randn(SAMPLES, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (SAMPLES,), generator=g),
        }
        for _ in range(STEPS)
    )


def tokens() -> tuple[Batch, ...]:
    g = torch.Generator().manual_seed(1)
    made = [torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1), generator=g) for _ in range(STEPS)]
    return tuple({"tokens": t[:, :-1].contiguous(), "y": t[:, 1:].contiguous()} for t in made)


VECTORS, TOKENS = vectors(), tokens()


def class_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch["y"].flatten())


def trains_of(
    model: Callable[[], nn.Module],
    batches: tuple[Batch, ...] = VECTORS,
    loss: Measure = class_loss,
    optimizer: Optimizer = SGD,
    micro_batches: int = 2,
    split: Mapping[str, int] = {"a.weight": 0},
) -> Training:
    """Three steps.  split: weight pattern -> dim, on the axis tensor."""
    fields = inspect.signature(model().forward).parameters
    inputs = {name: name for name in fields if name in batches[0]}
    pins = tuple(Pin(name, "variable", "tensor", S(dim)) for name, dim in split.items())
    made = partial(seeded, model)
    return Training(made, inputs, loss, batches, optimizer, micro_batches, pins)


def assert_trains_alike(training: Training, layout: Layout, tolerance: float = 1e-5) -> None:
    """Losses, parameters and buffers after three steps are those of the plain loop."""
    losses, state = micro_batch_loop(training, STEPS)
    found = virtual_run(training, layout, STEPS)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    torch.testing.assert_close(found.losses, losses, rtol=tolerance, atol=tolerance)
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, state[name], rtol=10 * tolerance, atol=tolerance)


class Net(nn.Module):
    """Two layers; subclasses compute something between them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(WIDTH, width), nn.Linear(width, CLASSES)

    def between(self, z: Tensor) -> Tensor:
        """Return the hidden values, or what a subclass makes of them."""
        return z

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.between(self.a(x)))


class Asserting(Net):
    """Asserts that no hidden value is above a bound.

    pytest rewrites asserts of test files, as torch cannot capture them.
    """

    bound = 100.0

    def between(self, z: Tensor) -> Tensor:
        assert (z < self.bound).all(), "a hidden value is too large"
        return torch.relu(z)
