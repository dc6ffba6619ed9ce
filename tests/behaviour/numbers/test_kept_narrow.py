"""Weights and states that are kept in bf16, rounded at random: each layout trains as a plain loop
that rounds the same values after each step.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import plan_training
from flowrun.engine.ops.flow.rounding import round_at_random, stream_of
from flowrun.engine.strategy import Kept, Optimizer
from flowrun.models.optimizers import lion
from support.layouts.grids import FIVE, Layout, captured, live_bytes, run_plan, strategy
from support.layouts.plain_loop import (
    STEPS,
    Trained,
    Training,
    gpt,
    loss_difference,
    torch_optimizer,
)

TOLERANCE = 1e-5  # relative, of the losses of ten steps in fp32
TRAINING = gpt(2, 16)
KEPT = {
    "weights": Kept(weights=True, seed=3),
    "states": Kept(states=True, seed=3),
    "both": Kept(weights=True, states=True, seed=3),
    "both, norms in fp32": Kept(weights=True, states=True, wide=("*ln*", "norm.*"), seed=3),
}


def plan_of(training: Training, layout: Layout, kept: Kept) -> Plan:
    asked = replace(strategy(training, layout), kept=kept)
    return plan_training(captured(training), asked).plan


def rounded(x: Tensor, step: int, kept: Kept, name: str, k: int) -> Tensor:
    """A value after a step, counted from 1."""
    draw = torch.tensor(float(step))
    return round_at_random(x, draw, kept.seed, stream_of(name, k), tuple(x.shape)).float()


def plain_loop(training: Training, kept: Kept) -> Trained:
    """torch.optim in fp32 on values that bf16 has."""
    model = training.model().train()
    narrow = {name: p for name, p in model.named_parameters() if kept.narrows(name)}
    if kept.weights:
        for p in narrow.values():
            p.data = p.data.bfloat16().float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, losses = torch_optimizer(training.optimizer, model), []
    for step, batch in enumerate(training.batches[:STEPS], 1):
        optimizer.zero_grad()
        _, loss = training.output_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, p in narrow.items():
            if kept.weights:
                p.data = rounded(p.data, step, kept, name, 0)
            if kept.states:
                state = optimizer.state[p]
                kinds = [kind for kind in ("exp_avg", "exp_avg_sq") if kind in state]
                for k, kind in enumerate(kinds, 1):
                    state[kind] = rounded(state[kind], step, kept, name, k)
    return Trained(tuple(losses), before, {n: p.detach() for n, p in model.named_parameters()})


NUMBERS = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
BY_LION = Optimizer("lion", (("lr", 1e-3), *NUMBERS.items()), function=lion)
LION = replace(TRAINING, optimizer=BY_LION)


def lion_loop(kept: Kept) -> list[float]:
    """The function itself, in fp32 on values that bf16 has."""
    model = LION.model().train()
    states = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    losses = []
    for step, batch in enumerate(LION.batches[:STEPS], 1):
        model.zero_grad()
        _, loss = LION.output_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for name, p in model.named_parameters():
            assert p.grad is not None
            new = lion(p.data, p.grad, states[name], lr=torch.tensor(1e-3), **NUMBERS)
            p.data, states[name] = (rounded(x, step, kept, name, k) for k, x in enumerate(new))
    return losses


@pytest.fixture(scope="module")
def plain() -> Mapping[str, Trained]:
    return {name: plain_loop(TRAINING, kept) for name, kept in KEPT.items()}


@pytest.mark.parametrize("layout", FIVE, ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_losses_are_those_of_a_plain_loop_of_the_same_rounding(
    name: str, layout: Layout, plain: Mapping[str, Trained]
) -> None:
    plan = plan_of(TRAINING, layout, KEPT[name])
    found = run_plan(TRAINING, plan, STEPS)
    assert loss_difference(found.losses, plain[name]) <= TOLERANCE


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(data=2, zero=3)], ids=str)
def test_a_traced_optimizer_is_rounded_as_well(layout: Layout) -> None:
    kept = KEPT["both"]
    found = run_plan(LION, plan_of(LION, layout, kept), STEPS)
    assert found.losses == pytest.approx(lion_loop(kept), rel=TOLERANCE)


def test_every_weight_and_state_takes_two_bytes_an_element() -> None:
    plan = plan_of(TRAINING, Layout(), KEPT["both"])
    kept = [v for v in plan.graph.variables if v.kind == "parameter" or v.of]
    assert {plan.tensors[v.tensor].dtype for v in kept} == {torch.bfloat16}


def test_foreseen_memory_is_that_of_live_tensors() -> None:
    """Of weights that autocast reads as they are; measured: 3 % more, in the update."""
    training = replace(gpt(2, 64), autocast=torch.bfloat16)
    asked = replace(strategy(training, Layout()), kept=KEPT["both"])
    made = plan_training(captured(training), asked)
    taken = live_bytes(training, made.plan, steps=1)
    assert made.rehearsal.peak_bytes[0] == pytest.approx(taken, rel=0.1)
