import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrun.engine.capture.capture import own_loss
from flowrun.models import losses, metrics
from flowrun.models.reference import WithReference

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


def test_positions_that_do_not_count_are_in_no_loss_and_no_metric() -> None:
    logits, targets = seeded_logits(2, 3, 5), torch.tensor([[1, 2, -100], [0, 4, -100]])
    both = {"model": logits, "reference": 2 * logits}
    kept = {name: each[:, :2] for name, each in both.items()}
    whole = losses.distillation(both, {"targets": targets})
    assert whole == pytest.approx(float(losses.distillation(kept, {"targets": targets[:, :2]})))
    scores, hits = torch.tensor([1.0, 2.0, 3.0, 0.5]), torch.tensor([0, 1, 1, -100])
    area: Any = metrics.auc
    assert area.of_rows(area(scores, {"targets": hits})) == 1.0
    mean: Any = metrics.f1
    assert math.isnan(mean.of_rows(torch.tensor([[1.0, -100.0]])))


def test_a_model_beside_its_reference_reads_samples_as_they_are() -> None:
    """Rows of a sequence are no samples: a recurrent layer would go on from one to the next."""
    layer = torch.nn.GRU(4, 3, batch_first=True)
    layer.register_forward_hook(lambda module, given, made: made[0])
    x = seeded_logits(2, 5, 4)
    assert torch.equal(WithReference(layer)(x)["model"], layer(x))


@pytest.mark.parametrize("shape", [(1, 2, 4), (4, 3, 4), (4, 4)])
def test_contrast_refuses_what_are_not_two_views_of_several_samples(shape: Any) -> None:
    with pytest.raises(ValueError, match="views need"):
        losses.contrast(torch.ones(shape), {})


def seeded_logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


COLUMN, ROW = torch.tensor([[0.0], [3.0]]), torch.tensor([1.0, 0.0])


def test_a_column_meets_each_target_once() -> None:
    """Broadcast, (2, 1) against (2,) would be (2, 2)."""
    batch = {"targets": ROW}
    for loss in (losses.squared_error, losses.binary_cross_entropy, metrics.binary_accuracy):
        assert loss(COLUMN, batch) == loss(COLUMN[:, 0], batch)
    assert losses.squared_error(COLUMN, batch) == 5
    classes = {"targets": torch.tensor([[0], [0]])}
    assert metrics.accuracy(LOGITS, classes) == 0.5


def test_targets_of_another_shape_are_refused() -> None:
    for loss in (losses.squared_error, losses.binary_cross_entropy, metrics.binary_accuracy):
        with pytest.raises(
            ValueError, match=r"target has the shape \(2,\) and the output \(2, 3\)"
        ):
            loss(torch.zeros(2, 3), {"targets": ROW})


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float32])
def test_class_ids_have_any_dtype(dtype: torch.dtype) -> None:
    batch = {"targets": BATCH["targets"].to(dtype)}
    assert losses.cross_entropy(LOGITS, batch) == losses.cross_entropy(LOGITS, BATCH)


def test_classes_may_be_another_dim_than_the_last() -> None:
    logits = torch.arange(120.0).view(2, 5, 3, 4) % 7
    classes = torch.arange(24).view(2, 3, 4) % 5
    loss = losses.cross_entropy(logits, {"targets": classes}, class_dim=1)
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, classes).item())
    exact = torch.nn.functional.one_hot(classes).movedim(-1, 1).float()
    assert metrics.accuracy(exact, {"targets": classes}, class_dim=1) == 1


def test_class_ids_that_would_meet_the_logits_of_other_positions_are_refused() -> None:
    """As those of nn.LSTM without batch_first: (T, B, V) for ids (B, T)."""
    with pytest.raises(ValueError, match="each needs logits of its own"):
        losses.cross_entropy(torch.zeros(3, 2, 5), {"targets": torch.zeros(2, 3).long()})
    flat = losses.cross_entropy(torch.zeros(6, 5), {"targets": torch.zeros(2, 3).long()})
    assert flat == pytest.approx(math.log(5))
