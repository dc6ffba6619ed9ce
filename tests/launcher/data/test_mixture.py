import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.mixture import DataMixture, MixtureOrder
from flowrun.launcher.data.stacked import Rows
from flowrun.launcher.recipe.compose import load

SIZES = st.lists(st.integers(2, 40), min_size=1, max_size=4)


SEEDS = st.integers(0, 1000)


@st.composite
def arguments(draw: Any) -> tuple[Any, ...]:
    """Sizes, shares, number of samples, held-out share and seed of a mixture."""
    sizes = draw(SIZES)
    weights = draw(st.lists(st.floats(0.1, 5), min_size=len(sizes), max_size=len(sizes)))
    shares = [weight / sum(weights) for weight in weights]
    samples = draw(st.none() | st.integers(200, 400))
    return sizes, shares, samples, draw(st.sampled_from([0.0, 0.05, 0.3])), draw(SEEDS)


def parts(made: MixtureOrder) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, index) of all items that are trained on, and of all that are held out."""
    source, index = made.find(np.arange(made.samples))
    items = [*zip(source.tolist(), index.tolist(), strict=True)]
    limit = made.samples - made.held_out
    return items[:limit], items[limit:]


@given(arguments())
def test_shares_are_exact_in_each_part(drawn: tuple[Any, ...]) -> None:
    made = MixtureOrder(*drawn)
    for items in parts(made):
        for k, share in enumerate(made.shares):
            count, exact = sum(source == k for source, _ in items), share * len(items)
            assert math.floor(exact + 1e-9) <= count + 1e-9 <= math.ceil(exact) + 1e-6


@given(arguments())
def test_samples_of_a_source_occur_equally_often(drawn: tuple[Any, ...]) -> None:
    made = MixtureOrder(*drawn)
    below, part = parts(made)[0], made.parts[0]
    for k, size in enumerate(part.sizes):
        found = [below.count((k, index)) for index in range(size)]
        assert max(found) - min(found) <= 1 and sum(found) == part.counts[k]


@given(arguments())
def test_nothing_that_is_trained_on_is_held_out(drawn: tuple[Any, ...]) -> None:
    below, above = parts(MixtureOrder(*drawn))
    assert not {*below} & {*above}
    assert all(index >= 0 for _, index in below + above)


@given(arguments(), st.data())
def test_an_item_is_a_function_of_its_number_alone(
    drawn: tuple[Any, ...], data: st.DataObject
) -> None:
    one, other = MixtureOrder(*drawn), MixtureOrder(*drawn)
    numbers = data.draw(st.lists(st.integers(0, one.samples - 1), min_size=1, max_size=20))
    whole, some = one.find(np.arange(one.samples)), other.find(np.array(numbers))
    assert all(a[numbers].tolist() == b.tolist() for a, b in zip(whole, some, strict=True))


@given(SIZES, st.floats(0.05, 0.95), SEEDS)
def test_without_a_number_of_samples_there_are_enough_for_all_to_occur(
    sizes: list[int], weight: float, seed: int
) -> None:
    weights = [weight] + [1 - weight] * (len(sizes) - 1)
    shares = [weight / sum(weights) for weight in weights]
    made = MixtureOrder(sizes, shares, None, 0.0, seed)
    assert len({*parts(made)[0]}) == sum(sizes)
    assert made.samples <= max(size / share for size, share in zip(sizes, shares, strict=True)) + 1


def rows(source: int, size: int, **more: Any) -> Rows:
    """A data set whose items say where they come from."""
    made = Rows(source=torch.full((size,), source), index=torch.arange(size))
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_items_come_from_their_sources_in_one_call_as_in_many() -> None:
    data = DataMixture({"a": rows(0, 10), "b": rows(1, 30)}, {"a": 3, "b": 1}, held_out=0.1, seed=4)
    source, index = data.order.find(np.arange(len(data)))
    batch = data.stacked(torch.arange(len(data)))
    assert batch["source"].tolist() == source.tolist() and batch["index"].tolist() == index.tolist()
    assert all(data[k]["index"] == index[k] for k in range(0, len(data), 7))
    assert abs(np.mean(source == 0) - 0.75) < 1 / len(data) * 2


def test_another_seed_gives_another_order_of_sources_and_of_each() -> None:
    def orders(seed: int) -> list[Any]:
        data = DataMixture({"a": rows(0, 50), "b": rows(1, 50)}, seed=seed)
        source, index = data.order.find(np.arange(100))
        return [source.tolist(), *(index[source == k].tolist() for k in range(2))]

    assert all(one != other for one, other in zip(orders(1), orders(2), strict=True))
    assert load(["recipe=gpt_dp", "data=mixture", "train.seed=7"]).data["seed"] == 7


def test_neighbours_are_mixed_as_the_whole_is() -> None:
    source, _ = MixtureOrder([1000, 1000], [0.8, 0.2], 5000, 0.1, 3).find(np.arange(5000))
    for start in range(0, 5000 - 50, 50):
        assert 35 <= (source[start : start + 50] == 0).sum() <= 45


def test_what_sources_say_is_passed_on() -> None:
    one = rows(0, 4, notes=("it is tokenised",), vocabulary=300, sample_seconds=1e-3)
    data = DataMixture({"a": one, "b": rows(1, 4, vocabulary=300)}, {"a": 1, "b": 3})
    assert data.vocabulary == 300 and data.notes == (
        "an epoch of the mixture is 4 samples of a (1 times all of it), "
        "12 samples of b (3 times all of it)",
        "a: it is tokenised",
    )
    assert data.sample_seconds == pytest.approx(0.25e-3)


def text_of_a_tokenizer() -> Text:
    """Text whose ids seem to be a tokenizer's, as many as there are bytes."""
    made = Text(length=8, max_bytes=90)
    made.ids_digest = "1234abcd" * 8
    return made


@pytest.mark.parametrize(
    ("sources", "keys", "words"),
    [
        ({}, {}, "a mixture has sources"),
        ({"a": rows(0, 4)}, {"weights": {"b": 1}}, "weights are of b; sources are a"),
        ({"a": rows(0, 4)}, {"weights": {"a": 0}}, "weights.a: it is 0, not a positive number"),
        ({"a": rows(0, 4)}, {"length": 8}, r"length is 8, and items are index \(\) int64"),
        (
            {"a": rows(0, 4), "b": Rows(index=torch.zeros(3, 2))},
            {},
            r"items of b are index \(2,\) float32, those of a index \(\) int64",
        ),
        (
            {"a": rows(0, 4, vocabulary=300), "b": rows(0, 4, vocabulary=320)},
            {},
            "unlike numbers of ids, {'a': 300, 'b': 320}: give all one tokenizer",
        ),
        (
            {"a": Text(length=8, max_bytes=90), "b": text_of_a_tokenizer()},
            {},
            r"the same id stands for unlike text in the sources \(a: bytes, b: of a tokenizer, "
            r"digest 1234abcd\): give all one tokenizer",
        ),
        (
            {"a": rows(0, 40), "b": rows(0, 4)},
            {"weights": {"a": 1000, "b": 1}, "samples": 40},
            "a source has none of 40 samples: its weight is too small",
        ),
        (
            {"a": rows(0, 40), "b": rows(0, 1)},
            {"held_out": 0.5},
            "a source of one sample cannot hold one out",
        ),
        ({"a": rows(0, 4)}, {"samples": 2**40}, "is over 3,000,000,000"),
    ],
)
def test_what_is_no_mixture_is_refused(
    sources: dict[str, Any], keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        DataMixture(sources, **keys)
