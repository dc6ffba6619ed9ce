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
from flowrun.engine.ops.math.matmul import aligned_product
from flowrun.models.gpt import GPT
from support.layouts.grids import FIVE, Layout, assert_as_plain_torch, captured, run_plan, strategy
from support.layouts.plain_loop import CONTEXT, STEPS, Training, gpt, seeded, token_batches

CLASSES, WIDTH, SAMPLES = 250, 16, 16


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


def products(plan: Plan) -> list[Op]:
    works = (actor.work for actor in plan.actors if isinstance(actor.work, RegionWork))
    return [op for work in works for op in work.ops if op.target == "flow.aligned_product"]


@pytest.mark.parametrize(("training", "layout"), CASES, ids=[f"{NAMES[t]} {n}" for t, n in CASES])
def test_padded_classes_train_as_a_plain_loop(training: Training, layout: Layout) -> None:
    plan = padded(training, layout)
    assert_as_plain_torch(training, run_plan(training, plan, STEPS))
    assert len(products(plan)) == 3
    (note,) = (note for note in plan.notes if "pad_classes" in note)
    assert note.startswith("head: its products see a multiple of 64 classes, zeros after the 250")


def test_rows_of_logits_are_aligned() -> None:
    x, w = torch.randn(3, 4), torch.randn(7, 4)
    logits = aligned_product(x, w, None, "mk,ck->mc")
    assert (logits.shape, logits.stride()) == ((3, 7), (64, 1))
    assert torch.allclose(logits, x @ w.t())


def test_aligned_classes_are_left_as_they_are() -> None:
    assert products(padded(gpt(1, WIDTH), Layout())) == []
