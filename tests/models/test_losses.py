import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrun.engine.capture.capture import own_loss
from flowrun.models import losses, metrics

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
OTHER = torch.zeros(2, 2)
BATCH = {"targets": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("output", "part"),
    [
        (LOGITS, None),
        ({"logits": LOGITS, "aux": OTHER}, None),
        (SimpleNamespace(logits=LOGITS), None),
        ((OTHER, LOGITS), 1),
        ({"aux": OTHER, "mine": LOGITS}, "mine"),
        (SimpleNamespace(mine=LOGITS), "mine"),
    ],
)
def test_a_loss_reads_the_part_that_is_named(output: Any, part: losses.OutputPart) -> None:
    assert torch.equal(
        losses.cross_entropy(output, BATCH, part=part),
        torch.nn.functional.cross_entropy(LOGITS, BATCH["targets"]),
    )
    assert metrics.accuracy(output, BATCH, part=part) == 1
    exact = {"targets": LOGITS}
    assert losses.squared_error(output, exact, part=part) == 0
    assert metrics.binary_accuracy(output, {"targets": LOGITS > 0}, part=part) == 1


def test_the_loss_of_a_model_is_its_output_or_a_part_of_it() -> None:
    loss = torch.tensor(3.0)
    for output in (loss, {"loss": loss}, SimpleNamespace(loss=loss)):
        assert own_loss(output) is loss
    assert losses.model_loss((OTHER, loss), {}, part=1) is loss


def test_metrics_of_rows_are_those_of_scikit_learn() -> None:
    reference = pytest.importorskip("sklearn.metrics")
    draws = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (50,), generator=draws).float()  # with ties
    hits = torch.randint(0, 2, (50,), generator=draws)
    rows = metrics.auc(scores, {"targets": hits})
    assert metrics.auc.of_rows(rows) == pytest.approx(reference.roc_auc_score(hits, scores))
    assert math.isnan(metrics.auc.of_rows(rows[rows[:, 1] > 0]))
    logits, classes = (
        torch.randn(50, 4, generator=draws),
        torch.randint(0, 5, (50,), generator=draws),
    )
    expected = reference.f1_score(classes, logits.argmax(-1), average="macro")
    assert metrics.f1.of_rows(metrics.f1(logits, {"targets": classes})) == pytest.approx(expected)
    classes[:9] = -100
    expected = reference.f1_score(classes[9:], logits[9:].argmax(-1), average="macro")
    assert metrics.f1.of_rows(metrics.f1(logits, {"targets": classes})) == pytest.approx(expected)
