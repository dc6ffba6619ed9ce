"""Random ops: numbers of their own for every seed, stream, draw and element.

Statistics are of fixed draws, so a bound that holds once holds always.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.ops.flow import random
from flowrun.engine.runtime.transport.transport import cut

SHAPE = (64, 50, 20)
DRAW = torch.tensor(11)


def drawn(seed: int = 1, stream: str = "a", draw: int = 11, word: int = 0) -> torch.Tensor:
    return random.words(torch.tensor(draw), seed, stream, SHAPE, None, word)


@pytest.mark.parametrize(
    "other",
    [drawn(seed=2), drawn(stream="b"), drawn(draw=12), drawn(word=1)],
    ids=["seed", "stream", "draw", "word"],
)
def test_words_of_another_key_are_other_words(other: torch.Tensor) -> None:
    assert torch.equal(drawn(), drawn())
    assert (drawn() == other).sum() < 3  # of 64,000, where one in 2^32 is expected


def test_no_two_rows_are_alike() -> None:
    rows = torch.cat([drawn(draw=k).flatten(1) for k in range(20)])
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert len(torch.unique(rows)) > rows.numel() - 300  # 190 pairs meet by chance


@given(shape=st.lists(st.integers(1, 6), max_size=4), data=st.data())
def test_a_piece_is_cut_from_the_whole(shape: list[int], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = [data.draw(st.integers(0, n - s)) for s, n in zip(starts, shape, strict=True)]
    slices = tuple(zip(starts, lengths, strict=True))
    whole = random.words(DRAW, 1, "a", tuple(shape), None)
    assert whole.shape == tuple(shape)
    assert torch.equal(random.words(DRAW, 1, "a", tuple(shape), slices), cut(whole, slices))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_a_mask_drops_the_share_that_it_is_asked_for(p: float) -> None:
    dropped = ~random.dropout_mask(DRAW, 1, "a", SHAPE, p)
    assert float(dropped.float().mean()) == pytest.approx(p, abs=0.01)
    for dim in range(3):  # and no row, column or layer of it more than others
        share = dropped.float().mean([d for d in range(3) if d != dim])
        assert float((share - p).abs().max()) < 0.08


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_lie_in_the_half_open_interval(dtype: torch.dtype) -> None:
    result = random.uniform(DRAW, 1, "a", SHAPE, dtype=dtype)
    assert result.dtype == dtype
    assert result.min() >= 0
    assert result.max() < 1
    quarters = torch.histc(result.float(), 4, 0, 1) / result.numel()
    assert float((quarters - 0.25).abs().max()) < 0.01


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    result = random.normal(DRAW, 1, "a", SHAPE, dtype=torch.float32)
    moments = [float((result**k).mean()) for k in range(1, 5)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)
    assert float((result.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.01)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-3, 4), (0, 2**40)])
def test_integers_fill_their_range(low: int, high: int) -> None:
    result = random.integers(DRAW, 1, "a", SHAPE, low, high, dtype=torch.int64)
    assert result.min() >= low
    assert result.max() < high
    middle = (low + high - 1) / 2
    assert float(result.double().mean() - middle) / (high - low) == pytest.approx(0, abs=0.01)
    if high - low < 10:
        assert set(result.unique().tolist()) == set(range(low, high))


def test_a_permutation_has_every_number_once_and_in_another_order_for_another_draw() -> None:
    draws = map(torch.tensor, (0, 1))
    one, other = (random.permutation(k, 1, "a", (50,), dtype=torch.int64).tolist() for k in draws)
    assert sorted(one) == list(range(50))
    assert one != other


@pytest.mark.parametrize("first", ["row", "column", "draw"])
def test_neighbours_do_not_follow_each_other(first: str) -> None:
    """Correlation of the bits of an element with those of the next row, column and draw."""
    whole = drawn()
    one, other = {
        "row": (whole[:-1], whole[1:]),
        "column": (whole[..., :-1], whole[..., 1:]),
        "draw": (whole, drawn(draw=12)),
    }[first]
    for bit in range(32):
        alike = ((one >> bit) & 1) == ((other >> bit) & 1)
        assert float(alike.float().mean()) == pytest.approx(0.5, abs=0.01)
