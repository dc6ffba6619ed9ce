import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.capture.patches.substitutes import replace_functions

BAGS = [
    {"mode": mode, **more}
    for mode, more in itertools.product(
        ("sum", "mean", "max"), ({}, {"padding_idx": 0}, {"padding_idx": -1})
    )
]


def both(model: nn.Module, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
    """(output, gradients) of torch's own, then of what stands for it."""
    result = []
    for within in (False, True):
        model.zero_grad()
        if within:
            with replace_functions():
                out = model(*inputs)
        else:
            out = model(*inputs)
        out.sin().sum().backward()
        result.append((out.detach(), *(p.grad.clone() for p in model.parameters())))  # type: ignore[union-attr]
    return result


@pytest.mark.parametrize("settings", BAGS, ids=str)
def test_bags_of_equal_length_are_what_torch_makes_of_them(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(5, 3, **settings)
    ids = torch.tensor([[0, 1, 0, 2], [4, 4, 3, 0], [0, 0, 0, 0], [4, 4, 4, 4]])
    ours, theirs = both(bag, ids)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_of_samples_count() -> None:
    torch.manual_seed(0)
    bag, ids = nn.EmbeddingBag(5, 3, mode="sum"), torch.tensor([[0, 1], [4, 4]])
    with replace_functions():
        result = bag(ids, per_sample_weights=torch.tensor([[0.5, 2.0], [1.0, -1.0]]))
    torch.testing.assert_close(
        result, bag(ids, per_sample_weights=torch.tensor([[0.5, 2.0], [1.0, -1.0]]))
    )


class Ctc(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(6, 4, 5))
        self.loss = nn.CTCLoss(**settings)

    def forward(self, targets: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.logits.log_softmax(-1), targets, lengths, labels)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_of_padded_targets_is_torchs(reduction: str, zero_infinity: bool) -> None:
    torch.manual_seed(0)
    targets = torch.tensor([[1, 2, 0], [3, 0, 0], [1, 1, 2], [2, 2, 2]])
    labels = torch.tensor([2, 1, 3, 3])
    lengths = torch.tensor([6, 5, 6, 3 if zero_infinity else 6])  # 3: no path fits
    ours, theirs = both(
        Ctc(reduction=reduction, zero_infinity=zero_infinity), targets, lengths, labels
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_ctc_is_wide_under_autocast() -> None:
    torch.manual_seed(0)
    targets, lengths, labels = torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([6, 5]), [2, 1]
    logits = torch.randn(6, 2, 5, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for within in (contextlib.nullcontext(), replace_functions()):
        with torch.autocast("cpu"), within:
            loss = F.ctc_loss(logits.log_softmax(-1), targets, lengths, torch.tensor(labels))
        found.append((loss, *torch.autograd.grad(loss, logits)))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torch_has_its_own_functions_again() -> None:
    before = F.embedding_bag, F.ctc_loss
    with replace_functions():
        assert F.embedding_bag is not before[0]
    assert (F.embedding_bag, F.ctc_loss) == before


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("more", [{}, {"full": True, "reduction": "sum"}, {"eps": 0.9}], ids=str)
def test_the_loss_of_a_normal_distribution_is_torchs(rows: bool, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    width = torch.rand((4,) if rows else (4, 3), requires_grad=True)
    theirs = F.gaussian_nll_loss(x, y, width, **more)
    with replace_functions():
        ours = F.gaussian_nll_loss(x, y, width, **more)
    for result in zip(
        (ours, *torch.autograd.grad(ours, (x, width))),
        (theirs, *torch.autograd.grad(theirs, (x, width))),
        strict=True,
    ):
        torch.testing.assert_close(*result)


def test_a_variance_of_another_shape_is_refused_as_in_torch() -> None:
    with replace_functions(), pytest.raises(ValueError, match="incorrect size"):
        F.gaussian_nll_loss(torch.ones(4, 3), torch.ones(4, 3), torch.ones(2))
