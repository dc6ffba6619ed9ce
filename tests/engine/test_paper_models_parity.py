"""The paper's models train as plain torch does: 5 steps in fp32 under four layouts.

Losses within 1e-4 relative; batch normalisation over few values amplifies rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.compile import compile_training
from flowrun.engine.sbp import S
from flowrun.engine.strategy import Pin
from flowrun.models.bert import BERT
from flowrun.models.gpt import GPT
from flowrun.models.insightface import InsightFace, MarginClasses, Scores
from flowrun.models.losses import cross_entropy, margin_softmax
from flowrun.models.resnet import ResNet
from support.layouts import Layout, example, run_plan, strategy, task, virtual_run
from support.plain_loop import (
    ADAMW,
    MOMENTUM,
    VOCABULARY,
    Training,
    image_batches,
    loss_difference,
    plain_loop,
    seeded,
    token_batches,
)

STEPS = 5
LAYOUTS = [
    Layout(data=2),
    Layout(tensor=2),
    Layout(stages=2),
    Layout(data=2, stages=2, zero=2),
]


def pictures() -> tuple[Mapping[str, Tensor], ...]:
    draws = torch.Generator().manual_seed(5)
    return tuple(
        {
            "images": torch.randn(8, 3, 8, 8, generator=draws),
            "labels": torch.randint(0, 12, (8,), generator=draws),
        }
        for _ in range(STEPS)
    )


def masked() -> tuple[Mapping[str, Tensor], ...]:
    draws = torch.Generator().manual_seed(6)
    size = (8, 3)
    return tuple(
        {
            "tokens": batch["tokens"],
            "segments": (batch["tokens"] > 9).long(),
            "positions": torch.rand(8, 16, generator=draws).argsort(1)[:, :3],
            "targets": torch.randint(0, VOCABULARY, size, generator=draws),
        }
        for batch in token_batches(STEPS, 8)
    )


RESNET = Training(
    partial(seeded, partial(ResNet, [1, 1], 4, 12, True)),
    {"images_BCHW": "images"},
    partial(cross_entropy, target="labels"),
    pictures(),
    MOMENTUM,
    1,
)
TRAININGS = {
    "ResNet": RESNET,
    "InsightFace": replace(
        RESNET,
        model=partial(seeded, partial(InsightFace, [1, 1], 4, 8, 8, 12, scale=8.0, angle=0.2)),
        inputs={"images_BCHW": "images", "labels_B": "labels"},
        loss=margin_softmax,
    ),
    "BERT": Training(
        partial(seeded, partial(BERT, VOCABULARY, 16, 2, 2, 16, dropout=0.0)),
        {"tokens_BT": "tokens", "segments_BT": "segments", "positions_BK": "positions"},
        cross_entropy,
        masked(),
        ADAMW,
        2,
    ),
    "GPT-2": Training(
        partial(seeded, partial(GPT, VOCABULARY, 16, 2, 2, 16, bias=True, tied=True)),
        {"tokens_BT": "tokens"},
        cross_entropy,
        token_batches(STEPS, 8),
        ADAMW,
        2,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", list(TRAININGS))
def test_a_model_of_the_paper_trains_as_plain_torch(name: str, layout: Layout) -> None:
    training = TRAININGS[name]
    found = virtual_run(training, layout, STEPS)
    assert loss_difference(found.losses, plain_loop(training, steps=STEPS)) <= 1e-4
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
    plan = compile_training(task(PARTIAL_FC), example(PARTIAL_FC), wanted).plan
    assert run_plan(PARTIAL_FC, plan, STEPS).losses == pytest.approx(one.losses, rel=1e-5)
