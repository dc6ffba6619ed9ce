"""Same numbers everywhere: every layout trains as a plain loop does, on the virtual cluster."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import Optimizer, Pin
from flowrun.models.gpt import GPT
from support.layouts.grids import (
    CLIP,
    LAYOUTS,
    LOSS_TOLERANCE,
    WEIGHT_TOLERANCE,
    Layout,
    assert_as_plain_torch,
    assert_evaluates_as_plain_torch,
    compiled,
    compiled_evaluation,
    virtual_run,
)
from support.layouts.plain_loop import (
    CLASSES,
    CONTEXT,
    STEPS,
    TINY_CONVNET,
    TINY_GPT,
    TINY_MLP,
    VOCABULARY,
    Training,
    gpt,
    loss_difference,
    mlp,
    plain_loop,
    seeded,
    weight_difference,
)

SMALL_GPT = gpt(blocks=2, width=16)
FEW = [Layout(), Layout(data=2), Layout(tensor=2), Layout(stages=2), Layout(data=2, zero=2)]
ANY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
SMALL = pytest.mark.parametrize("training", [TINY_MLP, TINY_CONVNET], ids=["mlp", "convnet"])


def assert_trains_as_plain_torch(training: Training, layout: Layout) -> None:
    assert_as_plain_torch(training, virtual_run(training, layout), layout.clip_norm)


@ANY_LAYOUT
def test_gpt_trains_as_plain_torch(layout: Layout) -> None:
    assert_trains_as_plain_torch(TINY_GPT, layout)


@ANY_LAYOUT
def test_every_actor_sends_what_the_plan_says(layout: Layout) -> None:
    """In the run that was compared; test_communication.py says what the plan should say."""
    run = virtual_run(TINY_GPT, layout)
    planned = {
        actor.id: actor.sent_bytes * run.plan.acts_per_step(actor) * STEPS
        for actor in run.plan.actors
        if actor.sent_bytes
    }
    assert run.sent_bytes == planned


@SMALL
@pytest.mark.parametrize("layout", FEW, ids=str)
def test_small_nets_with_momentum_train_as_plain_torch(training: Training, layout: Layout) -> None:
    assert_trains_as_plain_torch(training, layout)


# ---- the comparison can fail ---------------------------------------------------------------------


@SMALL
def test_a_hundredth_of_a_learning_rate_is_seen_in_losses_and_weights(training: Training) -> None:
    settings = dict(training.optimizer.arguments)
    settings["lr"] *= 1.01
    other = replace(training, optimizer=Optimizer("sgd", tuple(settings.items())))
    plain, found = plain_loop(training), plain_loop(other)
    assert loss_difference(found.losses, plain) > LOSS_TOLERANCE
    assert weight_difference(found.after, plain) > WEIGHT_TOLERANCE["sgd"]


def test_clipping_that_is_left_out_is_seen_in_losses_and_weights() -> None:
    plain, found = plain_loop(TINY_GPT, CLIP), plain_loop(TINY_GPT)
    assert loss_difference(found.losses, plain) > LOSS_TOLERANCE
    assert weight_difference(found.after, plain) > WEIGHT_TOLERANCE["adamw"]


# ---- uneven splits -------------------------------------------------------------------------------

UNEVEN = {
    "hidden 10 over tensor 4": (mlp(hidden=10), Layout(tensor=4)),
    "hidden 10 over tensor 3, ZeRO 2": (mlp(hidden=10), Layout(data=2, tensor=3, zero=2)),
    "10 classes over tensor 4": (mlp(pinned=CLASSES), Layout(tensor=4)),
    "10 classes over tensor 3, clipped": (mlp(pinned=CLASSES), Layout(tensor=3, clip_norm=CLIP)),
    "4 channels over tensor 3": (TINY_CONVNET, Layout(tensor=3)),
    "4 heads and 64 tokens over tensor 3": (TINY_GPT, Layout(tensor=3)),
    "4 blocks over stages 3": (TINY_GPT, Layout(stages=3)),
}


@pytest.mark.parametrize(("training", "layout"), list(UNEVEN.values()), ids=list(UNEVEN))
def test_uneven_splits_train_as_plain_torch(training: Training, layout: Layout) -> None:
    assert_trains_as_plain_torch(training, layout)


def test_more_ranks_than_a_pinned_dim_is_long_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"dim 0 of .* is shorter than\s+the 5 ranks") as error:
        compiled(mlp(hidden=4), Layout(tensor=5))
    assert error.value.where == "sbp.hidden.*.tensor"


# ---- pinned activations and frozen weights -----------------------------------------------------


def pinned(pattern: str, where: str, dim: int) -> Pin:
    return Pin(pattern, where, "tensor", S(dim))


PINNED = {
    "logits split by class": pinned("head", "out", 2),
    "logits split by sample": pinned("head", "out", 0),
    "tokens split by sample": pinned("embed", "in", 0),
    "what passes between blocks split by token": pinned("blocks.*", "out", 1),
    "what enters the norms split by feature": pinned("blocks.*.ln*", "in", 2),
}


@pytest.mark.parametrize("line", list(PINNED.values()), ids=list(PINNED))
def test_pinned_activations_train_as_plain_torch(line: Pin) -> None:
    training = replace(SMALL_GPT, pins=(*SMALL_GPT.pins, line))
    layout = Layout(tensor=2)
    assert_trains_as_plain_torch(training, layout)
    ops = compiled(training, layout).plan.graph.ops
    assert {op.in_sbp for op in ops if op.target == "flow.pin"} == {((line.sbp,),)}


def _frozen() -> nn.Module:
    model = GPT(VOCABULARY, CONTEXT, 2, 4, 16)
    model.embed.wpe.weight.requires_grad_(False)
    return model


FROZEN = replace(SMALL_GPT, model=partial(seeded, _frozen))
OTHERS = [
    Layout(stages=2),
    Layout(data=2, tensor=2, stages=2, clip_norm=CLIP),
    Layout(data=2, zero=2),
    Layout(data=2, zero=3),
]


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_a_frozen_weight_stays_as_it_was(layout: Layout) -> None:
    plain, found = plain_loop(FROZEN, layout.clip_norm), virtual_run(FROZEN, layout)
    assert loss_difference(found.losses, plain) <= LOSS_TOLERANCE
    assert torch.equal(found.weights["embed.wpe.weight"], plain.before["embed.wpe.weight"])


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_3_shards_frozen_weights_too(stage: int) -> None:
    plan = compiled(FROZEN, Layout(data=2, zero=stage)).plan
    split = plan.variables["embed.wpe.weight"].nd_sbp == (S(0),)
    assert split == (stage == 3)


# ---- evaluation ----------------------------------------------------------------------------------


@ANY_LAYOUT
def test_evaluation_of_the_gpt_is_plain_torchs(layout: Layout) -> None:
    assert_evaluates_as_plain_torch(TINY_GPT, layout)


@SMALL
@pytest.mark.parametrize("layout", FEW, ids=str)
def test_evaluation_of_small_nets_is_plain_torchs(training: Training, layout: Layout) -> None:
    assert_evaluates_as_plain_torch(training, layout)


def test_evaluation_of_classes_that_are_split_unevenly_is_plain_torchs() -> None:
    assert_evaluates_as_plain_torch(*UNEVEN["10 classes over tensor 4"])


@ANY_LAYOUT
def test_evaluation_keeps_every_weight_where_training_has_it(layout: Layout) -> None:
    training = compiled(TINY_GPT, layout).plan
    homes = {v.name: (v.stage, v.nd_sbp) for v in training.graph.variables}
    for variable in compiled_evaluation(TINY_GPT, layout).plan.graph.variables:
        assert homes[variable.name] == (variable.stage, variable.nd_sbp)
