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
