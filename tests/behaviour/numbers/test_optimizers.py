"""Optimizers in every layout, beside torch's own or a plain formula: traced functions, groups,
schedules, clipping by value, moving averages.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.strategy import Optimizer
from flowrun.models import optimizers
from support.layouts.grids import FIVE, Layout, compiled, initial, logical_weights
from support.layouts.plain_loop import Training, mlp

STEPS = 5
ANY_LAYOUT = pytest.mark.parametrize("layout", FIVE, ids=str)
TINY = mlp(micro_batches=2)
Step = Callable[[int, dict[str, Tensor], dict[str, Tensor]], None]


def by_hand(training: Training, step: Step) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a plain loop; step(k from 0, parameters, gradients) works in place."""
    model = training.model().train()
    parameters = dict(model.named_parameters())
    losses = []
    for k, batch in enumerate(training.batches[:STEPS]):
        model.zero_grad()
        _, loss = training.output_loss(model, batch)
        loss.backward()
        with torch.no_grad():
            values = {name: p.data for name, p in parameters.items()}
            step(k, values, {name: p.grad for name, p in parameters.items() if p.grad is not None})
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in parameters.items()}


def with_torch(make: Callable[[nn.Module], torch.optim.Optimizer], training: Training) -> Step:
    twin = training.model()
    optimizer = make(twin)

    def step(k: int, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        for name, p in twin.named_parameters():
            p.data, p.grad = weights[name], gradients[name]
        optimizer.step()

    return step


def assert_follows(training: Training, layout: Layout, step: Step, tolerance: float) -> None:
    losses, weights = by_hand(training, step)
    ranks = VirtualCluster(compiled(training, layout).plan, training.rows, initial(training))
    results = ranks.run(STEPS)
    found = logical_weights(ranks.plan, {k: rank.variables for k, rank in ranks.ranks.items()})
    before = initial(training)
    for one, other in zip((r["loss"] for r in results), losses, strict=True):
        assert abs(one - other) <= 1e-5 * abs(other)
    for name, weight in weights.items():
        moved = (weight - before[name]).norm()
        assert (found[name] - weight).norm() <= tolerance * moved, name


# ---- traced functions ----------------------------------------------------------------------------


def function(name: str, lr: float, **settings: float) -> Training:
    """TINY, trained by a function of models/optimizers.py."""
    arguments = (("lr", lr), *settings.items())
    made = Optimizer(name, arguments, function=getattr(optimizers, name))
    return replace(TINY, optimizer=made)


LION = function("lion", 1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
LAMB = function("lamb", 1e-2, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.1)
ADAGRAD = function("adagrad", 0.05, eps=1e-10, weight_decay=0.01)


def lion_by_hand(training: Training) -> Step:
    average = {name: torch.zeros_like(p) for name, p in training.model().named_parameters()}

    def step(k: int, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        for name, w in weights.items():
            m, g = average[name], gradients[name]
            w.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * torch.sign(0.9 * m + (1 - 0.9) * g))
            m.mul_(0.99).add_(g, alpha=1 - 0.99)

    return step


def lamb_by_hand(training: Training) -> Step:
    first = {name: torch.zeros_like(p) for name, p in training.model().named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in training.model().named_parameters()}

    def step(k: int, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        for name, w in weights.items():
            m, v, g = first[name], second[name], gradients[name]
            m.mul_(0.9).add_(g, alpha=1 - 0.9)
            v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
            ratio = m / (1 - 0.9 ** (k + 1)) / ((v / (1 - 0.999 ** (k + 1))).sqrt() + 1e-6)
            update = ratio + 0.1 * w
            w.sub_(1e-2 * float(w.norm() / update.norm()) * update)

    return step


@ANY_LAYOUT
def test_lion_follows_its_formula(layout: Layout) -> None:
    assert_follows(LION, layout, lion_by_hand(LION), 1e-5)


@ANY_LAYOUT
def test_lamb_follows_its_formula(layout: Layout) -> None:
    assert_follows(LAMB, layout, lamb_by_hand(LAMB), 1e-4)


@ANY_LAYOUT
def test_adagrad_follows_torch(layout: Layout) -> None:
    make = lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, weight_decay=0.01)  # noqa: E731
    assert_follows(ADAGRAD, layout, with_torch(make, ADAGRAD), 1e-4)
