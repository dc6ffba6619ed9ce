"""How products around a cross entropy are computed changes no number: every layout trains as a
plain loop with classes padded.
"""

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from torch import nn

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.compile import plan_training
from flowrun.engine.ir.graph import Op
from flowrun.models.gpt import GPT
from support.layouts.grids import FIVE, Layout, assert_as_plain_torch, captured, run_plan, strategy
from support.layouts.plain_loop import CONTEXT, STEPS, Training, gpt, seeded, token_batches

CLASSES, PADDED, WIDTH, SAMPLES = 250, 256, 16, 16


def model(tied: bool = False, bias: bool = False) -> nn.Module:
    made = GPT(CLASSES, CONTEXT, 1, 4, WIDTH, tied=tied)
    if bias:
        made.head = nn.Linear(WIDTH, CLASSES)
    return made


def odd(**how: bool) -> Training:
    """A tiny GPT of 250 classes, 125 on each of two ranks."""
    make = partial(seeded, partial(model, **how))
    return replace(gpt(1, WIDTH), model=make, batches=token_batches(STEPS, SAMPLES, CLASSES))


ODD, BIASED = odd(), odd(bias=True)
TIED = replace(odd(tied=True), pins=tuple(p for p in ODD.pins if p.pattern != "head.weight"))
CASES = [
    *((ODD, layout) for layout in (*FIVE, Layout(data=2, tensor=2, zero=3))),
    *((TIED, layout) for layout in FIVE),
    *((BIASED, layout) for layout in FIVE[:3]),
]
NAMES = {ODD: "own", TIED: "tied", BIASED: "biased"}


@lru_cache
def padded(training: Training, layout: Layout) -> Plan:
    asked = replace(strategy(training, layout), pads_classes=True)
    return plan_training(captured(training), asked).plan


def pads(plan: Plan) -> list[Op]:
    works = (actor.work for actor in plan.actors if isinstance(actor.work, RegionWork))
    return [op for work in works for op in work.ops if op.target == "flow.pad_pieces"]


@pytest.mark.parametrize(("training", "layout"), CASES, ids=[f"{NAMES[t]} {n}" for t, n in CASES])
def test_padded_classes_train_as_a_plain_loop(training: Training, layout: Layout) -> None:
    plan = padded(training, layout)
    assert_as_plain_torch(training, run_plan(training, plan, STEPS))
    shapes = {plan.tensors[op.makes[0]].shape for op in pads(plan)}
    tokens = SAMPLES // training.micro_batches * CONTEXT
    assert shapes - {(PADDED,)} == {(PADDED, WIDTH), (tokens, PADDED)}
    (note,) = (note for note in plan.notes if "pad_classes" in note)
    assert note.startswith("head: its products see 256 classes, 250 and zeros")


def test_a_weight_is_padded_once_a_step_but_with_each_gather_of_zero_3() -> None:
    def phases(layout: Layout) -> list[str]:
        made = pads(padded(ODD, layout))
        return [op.phase for op in made if op.inputs[0].startswith("head.weight")]

    assert phases(Layout(tensor=2)) == ["weights"]
    assert phases(Layout(data=2, zero=3)) == ["forward", "backward"]


def test_a_narrow_weight_is_padded_after_its_cast() -> None:
    plan = padded(replace(ODD, autocast=torch.bfloat16), Layout())
    (pad,) = (op for op in pads(plan) if op.phase == "weights")
    assert plan.tensors[pad.makes[0]].dtype == torch.bfloat16


def test_aligned_classes_are_left_as_they_are() -> None:
    assert pads(padded(gpt(1, WIDTH), Layout())) == []
