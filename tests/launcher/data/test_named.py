import pytest
import torch

from flowrun.engine.errors import RecipeError
from flowrun.launcher.data.collate import batch_of
from flowrun.launcher.data.named import NamedFields
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
