from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowrun.engine.errors import RecipeError
from flowrun.launcher.data.collate import batch_of
from flowrun.launcher.data.named import NamedFields, as_tensor, values_of
from flowrun.launcher.data.steps import sample_seconds
from flowrun.launcher.model.dataset_checks import check_items

PAIRS = [(torch.full((2,), float(k)), k % 3) for k in range(5)]


def test_values_have_the_names_that_are_given() -> None:
    data = NamedFields(PAIRS, ["x", "y"])
    check_items(data)
    batch = batch_of(data, torch.tensor([4, 1]))
    assert batch["x"].tolist() == [[4, 4], [1, 1]] and batch["y"].tolist() == [1, 1]
    assert len(data) == 5
    assert NamedFields([3, 4], ["x"])[1] == {"x": 4}


def test_the_time_that_a_sample_takes_is_that_of_the_data_set() -> None:
    class Slow(list[tuple[torch.Tensor, int]]):
        sample_seconds = 0.25

    assert sample_seconds(NamedFields(Slow(PAIRS), ["x", "y"])) == 0.25
    assert sample_seconds(NamedFields(PAIRS, ["x", "y"])) == 0.0


def test_a_wrong_number_of_names_is_named() -> None:
    with pytest.raises(RecipeError, match=r"it has 2 values, and 1 names are given\n.*item 0"):
        check_items(NamedFields(PAIRS, ["x"]))


def test_tuples_without_names_are_refused_with_what_to_write() -> None:
    with pytest.raises(RecipeError, match=r"item 0 is a tuple") as refused:
        check_items(PAIRS)
    assert "name its 2 values: data: {_target_: flowrun.launcher.data.named.NamedFields" in (
        refused.value.instead
    )


@dataclass
class Sample:
    image: Any
    label: int


ITEMS = {
    "a list": ([1.5, 2], {"0": 1.5, "1": 2}),
    "a dict": ({"x": [1, 2], "y": "a"}, {"x": [1, 2], "y": "a"}),
    "a dataclass": (Sample([0.5], 3), {"image": [0.5], "label": 3}),
    "a named tuple": (namedtuple("Point", "a b")(1, None), {"a": 1, "b": None}),
    "a value": (7, {"": 7}),
    "within": (
        ({"image": 1, "more": Sample(2, 3)}, 4),
        {"0.image": 1, "0.more.image": 2, "0.more.label": 3, "1": 4},
    ),
}


@pytest.mark.parametrize(("item", "values"), ITEMS.values(), ids=ITEMS)
def test_values_have_paths(item: object, values: dict[str, object]) -> None:
    assert dict(values_of(item)) == values


def test_fields_are_values_at_paths_or_in_their_order() -> None:
    items = [({"image": [k, 1], "id": "k"}, k) for k in range(3)]
    by_path = NamedFields(items, {"y": "1", "x": "0.image"})[2]
    in_order = NamedFields(items, ["x", None, "y"])[2]
    assert by_path["x"].tolist() == in_order["x"].tolist() == [2, 1]
    assert by_path["y"] == in_order["y"] == 2 and {*in_order} == {"x", "y"}


def test_what_makes_no_tensor_is_named_when_it_is_stacked() -> None:
    with pytest.raises(RecipeError, match="field 'x' of item 0 is a str"):
        check_items(NamedFields([("a", 1), ("b", 2)], ["x", "y"]))


RGB, GREY, MASK = (
    Image.new(mode, (3, 2), color) for mode, color in (("RGB", (255, 0, 51)), ("L", 51), ("P", 5))
)


@pytest.mark.parametrize(
    ("value", "shape", "dtype", "last"),
    [
        (1.5, (), torch.float32, 1.5),
        (True, (), torch.bool, True),
        ([[1, 2], [3, 4]], (2, 2), torch.int64, 4),
        (np.ones(3), (3,), torch.float32, 1),
        (np.float64(2), (), torch.float32, 2),
        (torch.ones(2).double(), (2,), torch.float32, 1),
        (torch.ones(2).half(), (2,), torch.float16, 1),
        (RGB, (3, 2, 3), torch.float32, 0.2),
        (GREY, (1, 2, 3), torch.float32, 0.2),
        (MASK, (2, 3), torch.int64, 5),
    ],
)
def test_values_become_tensors(
    value: object, shape: tuple[int, ...], dtype: torch.dtype, last: float
) -> None:
    tensor = as_tensor(value)
    assert tensor is not None and (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.flatten()[-1].item() == pytest.approx(last)


@pytest.mark.parametrize("value", ["a", None, [[1], [1, 2]], ["a"], object(), np.array(["a"])])
def test_no_tensor_is_made_of_other_values(value: object) -> None:
    assert as_tensor(value) is None
