"""Optimizers in every layout, beside torch's own or a plain formula: traced functions, classes of
torch.optim, updates by group.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.strategy import Optimizer
from flowrun.launcher.job.optimizer import OF_TORCH, optimizer_of
from flowrun.launcher.recipe.schema import Optim
from flowrun.models import optimizers
from support.layouts.grids import FIVE, Layout, compiled, initial, logical_weights, weights_of
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


# ---- classes of torch.optim ----------------------------------------------------------------------

CLASSES: Mapping[str, Mapping[str, Any]] = {
    "adadelta": {"rho": 0.8},
    "adafactor": {"weight_decay": 0.1},
    "adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "adam": {"amsgrad": True, "weight_decay": 0.1},
    "adamax": {"betas": (0.8, 0.95)},
    "asgd": {"t0": 2.0, "lambd": 0.1},  # averages from step 4 on
    "nadam": {"momentum_decay": 0.1},
    "adamw": {"weight_decay": 0.1},
    "radam": {"betas": (0.5, 0.7), "decoupled_weight_decay": True},  # rectified from step 5 on
    "rmsprop": {"momentum": 0.5, "centered": True},
    "rprop": {"etas": (0.4, 1.3)},
    "sgd": {"momentum": 0.9, "dampening": 0.3, "maximize": True},
}
NOT_TRACED = {"lbfgs": "closure", "sparseadam": "dense gradients"}


@cache
def by_class(name: str) -> Training:
    """TINY, trained by a class of torch.optim at a rate of 0.01."""
    update = {"_target_": f"torch.optim.{OF_TORCH[name].__name__}", **CLASSES[name]}
    return replace(TINY, optimizer=optimizer_of(Optim(lr=0.01, update=update), STEPS))


def test_every_class_of_torch_is_traced_or_refused_by_name() -> None:
    assert {*CLASSES, *NOT_TRACED, "muon"} == {*OF_TORCH}
    for name, reason in NOT_TRACED.items():
        with pytest.raises(RecipeError, match=reason) as error:
            optimizer_of(Optim(update={"name": name}), STEPS)
        assert error.value.where == "optim.name"
        assert OF_TORCH[name].__name__ in error.value.problem


@ANY_LAYOUT
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_torch_updates_as_it_does_itself(name: str, layout: Layout) -> None:
    training = by_class(name)
    make = lambda m: OF_TORCH[name](m.parameters(), lr=0.01, **CLASSES[name])  # noqa: E731
    assert_follows(training, layout, with_torch(make, training), 1e-5)


def muon_by_torch(training: Training) -> Step:
    parameters = [*training.model().parameters()]
    of = [[p for p in parameters if p.dim() == ndim] for ndim in (2, 1)]
    made = torch.optim.Muon(of[0], lr=1e-3), torch.optim.AdamW(of[1], lr=1e-3)

    def step(k: int, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        for p, w, g in zip(parameters, weights.values(), gradients.values(), strict=True):
            p.data, p.grad = w, g
        for optimizer in made:
            optimizer.step()

    return step


@cache
def muon() -> Training:
    groups = {"*.bias": {"update": "adamw"}}
    update = {"_target_": "torch.optim.Muon"}
    return replace(
        TINY, optimizer=optimizer_of(Optim(lr=1e-3, update=update, groups=groups), STEPS)
    )


@ANY_LAYOUT
def test_muon_updates_as_it_does_itself(layout: Layout) -> None:
    """It multiplies in bf16, where a sum in another order may round to a neighbour."""
    training = muon()
    _, weights = by_hand(training, muon_by_torch(training))
    ranks = VirtualCluster(compiled(training, layout).plan, training.rows, initial(training))
    ranks.run(STEPS)
    found = weights_of(ranks)
    for name, weight in weights.items():
        assert (weight - initial(training)[name]).abs().max() > 1e-4, name
        assert (found[name] - weight).abs().max() <= 1e-5, name


# ---- updates by group ----------------------------------------------------------------------------


def slow_muon(param: Tensor, grad: Tensor, momentum: Tensor, *, lr: Tensor) -> tuple[Tensor, ...]:
    """Muon in fp32: what layouts change by rounding stays small."""
    momentum = 0.95 * momentum + grad
    x = momentum / momentum.norm()
    for _ in range(5):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return param - lr * x, momentum


@cache
def by_group() -> Training:
    groups = {"*.weight": {"lr": 0.02, "update": "muon"}, "out*.bias": {"eps": 1e-6}}
    made = optimizer_of(Optim(lr=0.01, weight_decay=0.1, groups=groups), STEPS)
    matrices = replace(made.groups[0].update, settings=(), function=slow_muon)  # type: ignore[type-var]
    return replace(
        TINY,
        optimizer=replace(made, groups=(replace(made.groups[0], update=matrices), made.groups[1])),
    )


def two_by_hand(training: Training) -> Step:
    momenta = {name: torch.zeros_like(p) for name, p in training.model().named_parameters()}
    biases = [p for p in training.model().parameters() if p.dim() == 1]
    how = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    rest = torch.optim.AdamW([{"params": biases[:1]}, {"params": biases[1:], "eps": 1e-6}], **how)  # type: ignore[arg-type]

    def step(k: int, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        flat = iter(biases)
        for name, w in weights.items():
            if w.dim() == 2:
                given = w.clone(), gradients[name], momenta[name]
                new, momenta[name] = slow_muon(*given, lr=torch.tensor(0.02))
                w.copy_(new)
            else:
                p = next(flat)
                p.data, p.grad = w, gradients[name]
        rest.step()

    return step


@ANY_LAYOUT
def test_a_group_has_an_update_of_its_own(layout: Layout) -> None:
    training = by_group()
    assert_follows(training, layout, two_by_hand(training), 1e-4)
    (note,) = (n for n in compiled(training, layout).plan.graph.notes if n.startswith("updates"))
    assert "muon of 2 parameters (hidden.weight, output.weight)" in note and "adamw of 2" in note


WRONG_GROUPS: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "an update of matrices": (
        {"*": {"update": "muon"}},
        "optim.groups.*.update",
        "only supports 2D.*\n.*hidden.bias, of shape",
    ),
    "a number of another update": (
        {"*.weight": {"update": "muon"}, "hidden.*": {"eps": 0.1, "betas": [0.8, 0.9]}},
        "optim.groups.hidden.*.beta1",
        "the update of hidden.weight, muon, takes no 'beta1'",
    ),
    "two ways to say it": (
        {"*": {"update": {"name": "muon", "_target_": "torch.optim.Muon"}}},
        "optim.groups.*.update._target_",
        "nothing says",
    ),
    "no such name": (
        {"*": {"update": "moun"}},
        "optim.groups.*.update.name",
        "no update is 'moun'",
    ),
    "a number that changes its states": (
        {"*": {"update": "rmsprop"}, "hidden.*": {"momentum": 0.5}},
        "optim.groups.*.update",
        "it has a state 'momentum_buffer', too",
    ),
}


@pytest.mark.parametrize(("groups", "where", "problem"), WRONG_GROUPS.values(), ids=WRONG_GROUPS)
def test_a_group_with_a_wrong_update_is_refused(
    groups: Mapping[str, Any], where: str, problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        made = optimizer_of(Optim(groups=dict(groups)), STEPS)
        compiled(replace(TINY, optimizer=made), Layout())
    assert error.value.where == where


# ---- groups that begin later ---------------------------------------------------------------------

UNTIL = 2


def added_later(training: Training) -> Step:
    """AdamW of two groups, the second of which is added after some steps; gradients are clipped."""
    twin = dict(training.model().named_parameters())
    first = [p for name, p in twin.items() if not name.startswith("hidden")]
    later = [p for name, p in twin.items() if name.startswith("hidden")]
    optimizer = torch.optim.AdamW(first, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def step(k: int, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        if k == UNTIL:
            optimizer.add_param_group({"params": later, "lr": 0.02})
        for name, p in twin.items():
            p.data, p.grad = weights[name], gradients[name].clone()
        nn.utils.clip_grad_norm_(first + (later if k >= UNTIL else []), 0.1)
        optimizer.step()

    return step


@ANY_LAYOUT
def test_a_group_that_is_frozen_until_a_step_is_as_one_that_is_added_then(layout: Layout) -> None:
    groups = {"hidden.*": {"lr": 0.02, "frozen_until": UNTIL}}
    made = optimizer_of(Optim(lr=0.01, weight_decay=0.1, groups=groups), STEPS)
    training = replace(TINY, optimizer=made)
    assert_follows(training, replace(layout, clip_norm=0.1), added_later(training), 1e-4)
