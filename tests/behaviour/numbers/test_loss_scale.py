"""fp16 with a loss scale trains as torch's autocast and GradScaler do, in every layout, from a
planted overflow on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from flowrun.engine.strategy import LossScale
from support.layouts.grids import CLIP, Layout, cluster, compiled, logical_weights
from support.layouts.plain_loop import (
    Trained,
    Training,
    gpt,
    sgd,
    torch_optimizer,
    weight_difference,
)

STEPS = 7
# Gradients of this model overflow fp16 (65504) above 2^20.
TOO_HIGH = LossScale(2.0**23)
FP16 = replace(gpt(blocks=1, width=16), autocast=torch.float16, loss_scale=TOO_HIGH)
# AdamW would hide gradients of wrong length.
SGD = replace(FP16, optimizer=sgd(0.1, 0.9))
NOISE = 1e-3  # fp16 rounds at 2^-11; layouts add up in another order


@dataclass(frozen=True)
class Scaled:
    """losses, scales (after each step) and skipped updates (so far); weights at the end."""

    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[float, ...]
    weights: Mapping[str, Tensor]


@lru_cache(maxsize=16)
def flowrun_loop(training: Training, layout: Layout) -> Scaled:
    plan = compiled(training, layout).plan
    ranks = cluster(training, plan)
    results = ranks.run(STEPS)
    losses, scales, skipped = (
        tuple(step[name] for step in results) for name in ("loss", "loss_scale", "skipped_updates")
    )
    shards = {k: rank.variables for k, rank in ranks.ranks.items()}
    return Scaled(losses, scales, skipped, logical_weights(plan, shards))


@lru_cache(maxsize=4)
def torch_loop(training: Training, clip_norm: float = 0.0) -> Scaled:
    """torch.autocast and torch.amp.GradScaler, micro-batch by micro-batch."""
    assert training.loss_scale is not None
    model = training.model().train()
    optimizer = torch_optimizer(training.optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=training.loss_scale.start)
    losses, scales, skipped = [], [], [0.0]
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for k in range(training.micro_batches):
            batch = training.rows(step, k, slice(0, training.micro_batch))
            with torch.autocast("cpu", torch.float16):
                _, loss = training.output_loss(model, batch)
            scaler.scale(loss / training.micro_batches).backward()
            total += loss.item() / training.micro_batches
        if clip_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
        scales.append(scaler.get_scale())
        skipped.append(skipped[-1] + (scaler.get_scale() < before))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Scaled(tuple(losses), tuple(scales), tuple(skipped[1:]), weights)


LAYOUTS = [
    Layout(),
    Layout(clip_norm=CLIP),
    Layout(data=2),
    Layout(data=2, zero=2),
    Layout(tensor=2, stages=2, clip_norm=CLIP),
    Layout(data=2, tensor=2, stages=2, zero=3),
]


@pytest.mark.parametrize("training", [FP16, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_recovers_from_an_overflow_as_torchs_grad_scaler_does(
    layout: Layout, training: Training
) -> None:
    plain, found = torch_loop(training, layout.clip_norm), flowrun_loop(training, layout)
    assert found.scales == plain.scales
    assert found.skipped == plain.skipped
    assert found.skipped == (1, 2, 3, 3, 3, 3, 3)
    assert found.losses == pytest.approx(plain.losses, rel=NOISE)
    assert found.losses[-1] < found.losses[0]
    if training is SGD:
        before = training.model().state_dict()
        moved = Trained(plain.losses, before, plain.weights)
        assert weight_difference(found.weights, moved) <= 20 * NOISE


def test_a_skipped_update_changes_no_weight_and_no_state() -> None:
    never = replace(FP16, loss_scale=LossScale(2.0**60, dynamic=False))
    found = flowrun_loop(never, Layout(data=2, stages=2))
    assert found.skipped == tuple(map(float, range(1, STEPS + 1)))
    assert set(found.scales) == {2.0**60}
    for name, value in never.model().state_dict().items():
        assert torch.equal(found.weights[name], value)


def test_a_constant_scale_that_is_low_enough_skips_nothing() -> None:
    constant = replace(FP16, loss_scale=LossScale(1024.0, dynamic=False))
    found = flowrun_loop(constant, Layout(tensor=2))
    assert (set(found.scales), set(found.skipped)) == ({1024.0}, {0.0})
    assert found.losses == pytest.approx(torch_loop(replace(constant)).losses, rel=NOISE)


def test_variables_are_fp32() -> None:
    graph = compiled(FP16, Layout(data=2, zero=2)).plan.graph
    assert {graph.tensors[v.tensor].dtype for v in graph.variables} == {torch.float32}
    names = {v.name for v in graph.variables if not v.of and v.kind == "state"}
    assert names == {"loss_scale", "good_steps", "skipped_updates"}
