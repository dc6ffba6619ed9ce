import numpy as np
import pytest
import torch

from flowrun.launcher.data.clicks import Clicks, zipf_ranks
from flowrun.models.metrics import binary_accuracy


def test_a_sample_has_an_id_of_each_field() -> None:
    data = Clicks(samples=500, ids=80, fields=4, numbers=3)
    assert len(data) == 500
    item = data[7]
    assert item["ids"].shape == (4,) and item["numbers"].shape == (3,)
    assert item["clicks"].dtype == torch.float32
    assert torch.equal(data.fields["ids"] // 20, torch.arange(4).expand(500, 4))


def test_one_seed_makes_one_data_set() -> None:
    one, same, other = (Clicks(samples=50, seed=seed).fields for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["ids"], other["ids"])


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.5])
def test_ranks_follow_the_law(exponent: float) -> None:
    uniform = (np.arange(200_000) + 0.5) / 200_000
    counts = np.bincount(zipf_ranks(uniform, 1000, exponent), minlength=1000)
    edges = np.arange(1.0, 1002.0)
    law = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(law) / (law[-1] - law[0]) * 200_000
    assert len(counts) == 1000 and np.abs(counts - expected).max() <= 1


def test_clicks_and_their_absence_are_both_there() -> None:
    share = float(Clicks(samples=2000).fields["clicks"].mean())
    assert 0.3 < share < 0.7


def test_fewer_ids_than_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="too few for 8 fields"):
        Clicks(ids=7)


def test_accuracy_is_the_share_of_clicks_on_the_right_side_of_even_odds() -> None:
    logits, clicks = torch.tensor([2.0, -0.1, 0.1, -3.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert binary_accuracy(logits, {"clicks": clicks}, "clicks").item() == 0.5
