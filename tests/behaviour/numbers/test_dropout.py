"""What a module draws at random is the same in every layout, and another with every micro-batch.

Losses within 1e-5 relative of one rank's, float32 sums in another order; weights within 1e-5 of
the way that SGD moved them.
"""

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.actors.plan import Plan
from flowrun.engine.capture.capture import Task, capture_evaluation
from flowrun.engine.compile import Compilation
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow import random
from flowrun.engine.ops.proof.simulated_ranks import coordinates, local_view, run
from flowrun.engine.strategy import Recompute
from support.layouts.grids import Layout, example, run_plan, strategy, virtual_run
from support.layouts.plain_loop import Training, classifier, micro_batch_loop, pins

STEPS = 2
DROP = 0.3


class Dropped(nn.Module):
    """Two layers with dropout between, and one on what enters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(64, 12), nn.Linear(12, 10)
        self.first, self.drop = nn.Dropout(DROP), nn.Dropout(DROP)

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden_BH: Tensor = torch.tanh(self.hidden(self.first(x_BI)))
        return self.output(self.drop(hidden_BH))


class Attending(nn.Module):
    """Attention over 8 rows of an image, with dropout of the weights of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(8, 48), nn.Linear(16, 10)

    def forward(self, x_BI: Tensor) -> Tensor:
        x_BTC = x_BI.view(-1, 8, 8)
        qkv_BTHC = self.qkv(x_BTC).view(-1, 8, 4, 12)
        q, k, v = (part.transpose(1, 2) for part in qkv_BTHC.chunk(3, -1))
        y_BHTC = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return self.output(y_BHTC.transpose(1, 2).flatten(2).mean(1))


DROPPED = classifier(Dropped, "x_BI", pins({"hidden.*": 0, "output.weight": 1}), micro_batches=2)
ATTENDING = classifier(Attending, "x_BI", pins({"qkv.*": 0, "output.weight": 1}), micro_batches=2)
LAYOUTS = {
    "dropout, data 2 x tensor 2": (DROPPED, Layout(data=2, tensor=2)),
    "dropout, tensor 3": (DROPPED, Layout(tensor=3)),
    "dropout, data 2 x stages 2, ZeRO 2": (DROPPED, Layout(data=2, stages=2, zero=2)),
    "attention, data 2": (ATTENDING, Layout(data=2)),
    "attention, tensor 2 x stages 2": (ATTENDING, Layout(tensor=2, stages=2)),
}


@pytest.mark.parametrize(("training", "layout"), list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_every_layout_drops_alike(training: Training, layout: Layout) -> None:
    found, expected = (virtual_run(training, where, STEPS) for where in (layout, Layout()))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=1e-6)


@lru_cache
def plan(layout: Layout, seed: int) -> Plan:
    made = Task(DROPPED.model(), DROPPED.inputs, DROPPED.loss, seed=seed)
    return Compilation(made, example(DROPPED), strategy(DROPPED, layout)).training.plan


def test_two_runs_agree_bit_for_bit_and_another_seed_does_not() -> None:
    grid = Layout(data=2, tensor=2)
    first, again, other = (run_plan(DROPPED, plan(grid, seed), STEPS) for seed in (0, 0, 1))
    assert first.losses == again.losses
    assert all(torch.equal(first.weights[k], again.weights[k]) for k in first.weights)
    assert all(a != b for a, b in zip(first.losses, other.losses, strict=True))


def test_the_numbers_are_those_of_a_plain_loop_with_the_same_masks() -> None:
    """Draws count the micro-batches of the run, streams are the captured ops' names."""
    made = plan(Layout(), 5)
    masks = [op for op in made.graph.ops if op.target == "flow.dropout_mask"]
    streams = [op.args[2] for op in masks]
    assert streams == ["native_dropout", "native_dropout_1"]

    def mask(model: nn.Module, draw: int) -> None:
        for name, stream in zip(("first", "drop"), streams, strict=True):
            model.get_submodule(name).forward = partial(_masked, torch.tensor(draw), stream)

    losses, _ = micro_batch_loop(DROPPED, STEPS, before=mask)
    assert run_plan(DROPPED, made, STEPS).losses == pytest.approx(losses, rel=1e-6)


def _masked(draw: Tensor, stream: str, x: Tensor) -> Tensor:
    return x * random.dropout_mask(draw, 5, stream, tuple(x.shape), DROP) / (1 - DROP)


def test_ranks_that_hold_b_agree_and_ranks_that_hold_a_split_differ() -> None:
    made = plan(Layout(data=2, tensor=2), 0)
    grid, draw = made.placements[0].shape, {"@draw": torch.tensor(3)}
    first, second = (op for op in made.graph.ops if op.target == "flow.dropout_mask")
    assert [op.out_sbp for op in (first, second)] == [((S(0), B),), ((S(0), S(1)),)]
    for op, alike_over_tensor in ((first, True), (second, False)):
        mask = {
            here: run(registry.localize(local_view(op, made.graph.tensors, grid, here)), draw)[0]
            for here in coordinates(grid)
        }
        assert not torch.equal(mask[0, 0], mask[1, 0])
        assert torch.equal(mask[0, 0], mask[0, 1]) == alike_over_tensor


def test_evaluation_drops_nothing() -> None:
    made = Task(DROPPED.model(), DROPPED.inputs, DROPPED.loss)
    graph = capture_evaluation(made, example(DROPPED))
    assert not [op for op in graph.ops if "dropout" in op.target]
    assert "@draw" not in {feed.field for feed in graph.feeds}


# ---- activation checkpointing --------------------------------------------------------------------

EVERY_KIND = [Layout(), Layout(tensor=2), Layout(stages=2), Layout(data=2, zero=3)]


class Blocks(nn.Module):
    """Two blocks with dropout inside, so that recomputing one draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(DROP), nn.Linear(12, 12))
            for _ in range(2)
        )
        self.output = nn.Linear(12, 10)

    def forward(self, x_BI: Tensor) -> Tensor:
        x_BH: Tensor = self.hidden(x_BI)
        for block in self.blocks:
            x_BH = x_BH + block(x_BH)
        return self.output(x_BH)


BLOCKS = classifier(
    Blocks, "x_BI", pins({"blocks.*.0.*": 0, "blocks.*.3.weight": 1}), micro_batches=2
)


@pytest.mark.parametrize("layout", EVERY_KIND, ids=str)
def test_what_is_recomputed_drops_the_same_again(layout: Layout) -> None:
    checkpointed = replace(layout, recompute=Recompute(("blocks.*",)))
    plain, again = (virtual_run(BLOCKS, each, STEPS) for each in (layout, checkpointed))
    masks = [op.name for op in again.plan.graph.ops if op.target == "flow.dropout_mask"]
    assert len(masks) == 4 and sum(name.endswith("/again") for name in masks) == 2
    assert again.losses == plain.losses
    assert all(torch.equal(again.weights[k], value) for k, value in plain.weights.items())
