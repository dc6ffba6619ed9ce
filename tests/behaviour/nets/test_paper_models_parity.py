"""The paper's models train as plain torch does: 5 steps in fp32 under four layouts.

Losses within 1e-4 relative; batch normalisation over few values amplifies rounding.
"""

from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor, nn

from flowrun.engine.compile import Compilation
from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import Pin
from flowrun.models.insightface import MarginClasses, Scores
from flowrun.models.losses import margin_softmax
from support.layouts.grids import Layout, example, run_plan, strategy, task, virtual_run
from support.layouts.plain_loop import (
    MOMENTUM,
    Training,
    image_batches,
    loss_difference,
    plain_loop,
    seeded,
)
from support.nets.architecture import LAYOUTS, STEPS
from support.nets.architectures import training
from support.nets.paper_models import PAPER_MODELS

BOUND = 1e-4
CASES = [
    (name, layout)
    for name in PAPER_MODELS
    for layout in (*LAYOUTS.values(), Layout(data=2, zero=3))
    if layout.tensor == 1 or not layout.pinned
    if layout.stages > 1 or not PAPER_MODELS[name].zero
]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_a_model_of_the_paper_trains_as_plain_torch(name: str, layout: Layout) -> None:
    given = training(name)
    found = virtual_run(given, PAPER_MODELS[name].layout(layout), STEPS)
    assert loss_difference(found.losses, plain_loop(given, steps=STEPS)) <= BOUND
    assert [note for note in found.plan.notes if "signature" in note] == []


# ---- Partial-FC ----------------------------------------------------------------------------------


class Sampling(nn.Module):
    """A dense backbone before classes of which a step samples half."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(64, 8)
        self.head = MarginClasses(64, 8, scale=8.0, angle=0.2, sample=32, groups=4)

    def forward(self, images: Tensor, labels: Tensor) -> Scores:
        return self.head(self.backbone(images), labels)  # type: ignore[no-any-return]


PARTIAL_FC = Training(
    partial(seeded, Sampling),
    {"images": "images", "labels": "labels"},
    margin_softmax,
    tuple({n: v[:8] for n, v in batch.items()} for batch in image_batches(STEPS, 16, 64)),
    MOMENTUM,
    1,
)
SPLIT = (
    Pin("backbone", "out", "data", S(0)),
    Pin("head", "out", "data", S(1)),
    Pin("head.weight", "variable", "data", S(0)),
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_classes_that_a_step_samples_do_not_depend_on_the_layout(ranks: int) -> None:
    one = virtual_run(PARTIAL_FC, Layout(), STEPS)
    layout = Layout(data=ranks)
    wanted = replace(strategy(PARTIAL_FC, layout), pins=SPLIT)
    plan = Compilation(task(PARTIAL_FC), example(PARTIAL_FC), wanted).training.plan
    assert run_plan(PARTIAL_FC, plan, STEPS).losses == pytest.approx(one.losses, rel=1e-5)
