"""A margin softmax with its classes split over the ranks that have the samples (InsightFace).

It trains as plain torch does, and of the classes nothing travels: features and labels are gathered,
one number of a sample is reduced at a time.
"""

from dataclasses import replace
from functools import lru_cache, partial

import pytest
from torch import Tensor, nn

from flowrun.engine.actors.plan import BoxWork
from flowrun.engine.compile import Compilation, Rehearsed
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.strategy import Pin
from flowrun.models.insightface import MarginClasses, Scores
from flowrun.models.losses import margin_softmax
from flowrun.models.metrics import hit_rate
from support.layouts.grids import Layout, assert_as_plain_torch, example, run_plan, strategy, task
from support.layouts.plain_loop import MOMENTUM, Training, image_batches, seeded

STEPS, SAMPLES, CLASSES, FEATURES = 5, 16, 40, 8


class Faces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, FEATURES), nn.ReLU())
        self.head = MarginClasses(CLASSES, FEATURES, scale=16.0, angle=0.3, cosine=0.1)

    def forward(self, images: Tensor, labels: Tensor) -> Scores:
        return self.head(self.backbone(images), labels)  # type: ignore[no-any-return]


TRAINING = Training(
    partial(seeded, Faces),
    {"images": "images", "labels": "labels"},
    margin_softmax,
    image_batches(STEPS, SAMPLES, CLASSES),
    MOMENTUM,
    2,
    metrics={"accuracy": hit_rate},
)
PINS = (
    Pin("backbone.0", "out", "data", S(0)),
    Pin("head", "in", "data", B),
    Pin("head", "out", "data", S(1)),
    Pin("head.weight", "variable", "data", S(0)),
)


@lru_cache
def classes_split(ranks: int) -> Rehearsed:
    layout = Layout(data=ranks)
    wanted = replace(strategy(TRAINING, layout), pins=PINS)
    return Compilation(task(TRAINING), example(TRAINING), wanted).training


@pytest.mark.parametrize("ranks", [2, 4])
def test_classes_split_over_ranks_equal_the_whole_softmax(ranks: int) -> None:
    assert_as_plain_torch(TRAINING, run_plan(TRAINING, classes_split(ranks).plan, STEPS))


def test_features_and_labels_are_gathered_and_of_the_classes_only_statistics_travel() -> None:
    plan = classes_split(4).plan
    moved = {
        (step.kind, move.shape)
        for actor in plan.actors
        if isinstance(actor.work, BoxWork) and actor.phase != "update"
        for step, move in zip(actor.work.steps, actor.work.moves, strict=True)
    }
    batch = SAMPLES // TRAINING.micro_batches
    assert moved == {
        ("all_gather", (batch, FEATURES)),
        ("all_gather", (batch,)),
        ("exchange", (batch, 1)),
        ("exchange", (batch, FEATURES)),  # the gradient of the features
    }


def test_nothing_of_the_margin_softmax_falls_back() -> None:
    assert not classes_split(2).plan.notes
