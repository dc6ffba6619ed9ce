"""What a recipe asks of a data set's items, one by one and many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.dataset_checks import check_items
from flowrun.launcher.samples.sampler import Sampler

X = torch.arange(40.0).view(20, 2)


class Mine(Dataset[dict[str, Tensor]]):
    """{x (2,) float32}; called: how often an item was made alone."""

    def __init__(self) -> None:
        self.called = 0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.called += 1
        return {"x": X[index]}


def with_method(name: str, made: Callable[[Any], Any]) -> Mine:
    kind = type("Mine", (Mine,), {name: lambda self, indices: made(indices)})
    data: Mine = kind()
    return data


def sampler(data: Mine) -> Sampler:
    return Sampler(data=data, seed=3, batch_size=8, micro_batches=2, held_out=4)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("stacked", lambda indices: {"x": X.T[:, indices].T}),  # not contiguous
        ("__getitems__", lambda indices: [{"x": X[index]} for index in indices]),
    ],
    ids=["stacked", "getitems"],
)
def test_samples_are_made_many_at_once(name: str, made: Callable[[Any], Any]) -> None:
    data, alone = with_method(name, made), sampler(Mine())
    check_items(data)
    data.called = 0
    for step, micro_batch in ((0, 0), (0, 1), (7, 1)):
        found = sampler(data)(step, micro_batch, slice(1, 4))["x"]
        assert torch.equal(found, alone(step, micro_batch, slice(1, 4))["x"])
        assert found.is_contiguous()
    assert data.called == 0


def test_a_tensor_that_is_kept_under_that_name_is_no_method() -> None:
    data = Mine()
    data.stacked = X  # type: ignore[attr-defined]
    check_items(data)
    assert sampler(data)(0, 0, slice(0, 4))["x"].shape == (4, 2)


def test_micro_batches_and_rows_are_parts_of_one_step() -> None:
    pieces = sampler(Mine())
    whole = torch.cat([pieces(2, k, slice(0, 4))["x"] for k in range(2)])
    parts = [pieces(2, k, slice(a, a + 2))["x"] for k in range(2) for a in (0, 2)]
    assert torch.equal(torch.cat(parts), whole) and len(set(whole[:, 0].tolist())) == 8


WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "too few rows": (
        "stacked",
        lambda indices: {"x": X[indices[:1]]},
        "Mine.stacked, given the indices 0 and 1, makes 'x' of shape (1, 2) and torch.float32; "
        "two items make shape (2, 2) and torch.float32.",
    ),
    "another dtype": ("stacked", lambda indices: {"x": X[indices].long()}, "torch.int64; two"),
    "other fields": (
        "stacked",
        lambda indices: {"y": X[indices]},
        "makes the fields y; items have x.",
    ),
    "a list": ("stacked", lambda indices: [X[indices]], "makes a list, not a dict of tensors."),
    "a failure": ("stacked", lambda indices: X[indices + 99], "failed: IndexError: "),
    "too few items": (
        "__getitems__",
        lambda indices: [{"x": X[0]}],
        "Mine.__getitems__, given the indices 0 and 1, makes 'x' of shape (1, 2)",
    ),
    "no items": ("__getitems__", lambda indices: X[indices], "Mine.__getitems__, given"),
}


@pytest.mark.parametrize(("name", "made", "fact"), WRONG.values(), ids=WRONG)
def test_a_wrong_method_is_told_apart_at_once(
    name: str, made: Callable[[Any], Any], fact: str
) -> None:
    with pytest.raises(RecipeError) as error:
        check_items(with_method(name, made))
    assert "data._target_" in str(error.value) and fact in str(error.value)
    assert "It returns" in str(error.value)


def test_items_that_are_no_dicts_are_refused() -> None:
    data = with_method("__getitem__", lambda index: (X[index], index))
    with pytest.raises(RecipeError, match=r"item 0 is a tuple: return a dict, \{field: tensor\}"):
        check_items(data)


ALONE: dict[str, tuple[dict[str, str], str]] = {
    "another value": ({"x": "next"}, "makes tensor([2., 3.]); the item's 'x' is tensor([0., 1.])."),
    "no such field": ({"y": "next"}, "the item's 'y' is None."),
    "no such method": ({"x": "none"}, "failed: AttributeError: "),
}


@pytest.mark.parametrize(("unprepared", "fact"), ALONE.values(), ids=ALONE)
def test_a_field_made_alone_is_the_item_s(unprepared: dict[str, str], fact: str) -> None:
    data = with_method("next", lambda index: X[index + 1])
    data.unprepared = unprepared  # type: ignore[attr-defined]
    with pytest.raises(RecipeError) as error:
        check_items(data)
    assert fact in str(error.value) and "which `unprepared` names" in str(error.value)
