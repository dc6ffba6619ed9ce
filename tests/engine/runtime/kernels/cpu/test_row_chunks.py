import pytest
import torch

from flowrun.engine.ops.math import reduce
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import MEAN
from flowrun.engine.runtime.kernels.cpu import row_chunks

CLASSES = 64  # whole vectors, so that exp2 rounds alike


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 3 * CLASSES * 4)


def logits() -> torch.Tensor:
    return torch.randn(11, CLASSES, generator=torch.Generator().manual_seed(0))


def test_the_sum_of_exponentials_in_chunks_has_the_same_bits() -> None:
    made = row_chunks.log_sum_exp(logits(), (1,), keepdim=True)
    assert torch.equal(made, reduce.log_sum_exp(logits(), (1,), keepdim=True))


@pytest.mark.parametrize("over", [False, True], ids=["new", "over its logits"])
def test_the_gradient_in_chunks_has_the_same_bits(over: bool) -> None:
    x, target = logits(), torch.arange(11) % CLASSES
    lse = x.logsumexp(1, True)
    given = (lse, target, None, MEAN, 3, torch.tensor(10.0), None)
    expected = cross_entropy.gradient_of_logits(torch.tensor(0.5), x, *given)
    made = row_chunks.gradient_of_logits(torch.tensor(0.5), x, *given, out=x if over else None)
    assert torch.equal(made, expected)
    assert (made is x) == over
