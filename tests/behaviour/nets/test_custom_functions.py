"""A user's own torch.autograd.Function trains as in plain torch: what its backward computes is
backward, whatever it reads, and runs in the stage of its forward.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from flowrun.engine.capture.capture import capture
from flowrun.engine.ir.graph import BACKWARD, FORWARD
from support.layouts.grids import Layout, example, task
from support.nets.odd_models import DATA, STAGES, TENSOR, ZERO, Net, assert_trains_alike, trains_of


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.1


class Swish(Function):
    """What backward needs of the input it computes again."""

    @staticmethod
    def forward(x: Tensor, power: float) -> Tensor:
        return x * torch.sigmoid(power * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.power * x)
        return g * (s + ctx.power * x * s * (1 - s)), None


class TwoByTwo(Function):
    """Two inputs, two outputs, and a third that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        sign = (x > y).float()
        ctx.mark_non_differentiable(sign)
        return x * y, x + y, sign

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, product: Tensor, total: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product * y + total, product * x + total


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Scaled.apply(g.neg())


def _two_by_two(z: Tensor) -> Tensor:
    product, total, sign = TwoByTwo.apply(z, z.flip(1))
    return product + total * sign


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "scales": lambda z: torch.relu(Scaled.apply(z)),
    "computes again": lambda z: Swish.apply(z, 1.5),
    "two inputs and outputs": _two_by_two,
    "applies another": lambda z: torch.tanh(Reversed.apply(z)),
    "twice": lambda z: Scaled.apply(torch.relu(Scaled.apply(z))),
}


def _net(kind: str) -> type[Net]:
    class Own(Net):
        def between(self, z: Tensor) -> Tensor:
            return KINDS[kind](z)

    return Own


TRAINED = [
    *((kind, layout) for kind in KINDS for layout in (DATA, STAGES)),
    ("computes again", TENSOR),
    ("two inputs and outputs", ZERO),
]


@pytest.mark.parametrize(("kind", "layout"), TRAINED, ids=str)
def test_a_function_of_ones_own_trains_as_plain_torch(kind: str, layout: Layout) -> None:
    assert_trains_alike(trains_of(_net(kind)), layout)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_comes_first_and_reads_nothing_of_backward(kind: str) -> None:
    training = trains_of(_net(kind))
    graph = capture(task(training), example(training))
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, key=(FORWARD, BACKWARD).index)
    late = {name for op in graph.ops if op.phase == BACKWARD for name in op.makes}
    assert not [op for op in graph.ops if op.phase == FORWARD and late & {*op.inputs}]
    assert dict(graph.results)["loss"] not in late
