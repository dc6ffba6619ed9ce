"""Items that make no batch: one error with field and items, before the start or in mid-run."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.data.collate import ItemError
from flowrun.launcher.data.open_files import reopen_files
from flowrun.launcher.data.sampler import Sampler, field_types_of
from flowrun.launcher.job.forked import run_in_fork
from flowrun.launcher.model.dataset_checks import check_items, check_kind, random_fields
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from support.runs.command import Command, losses, run_folder

X = torch.arange(40.0).view(20, 2)


class Made(Dataset[Any]):
    """Items as a function makes them."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def sampler(make: Callable[[int], Any]) -> Sampler:
    """Of 4 samples a micro-batch, held to the field types of the first."""
    data, first = Made(make), field_types_of({"x": X, "n": torch.zeros(20, dtype=torch.int64)})
    return Sampler(data=data, seed=0, batch_size=4, micro_batches=1, held_out=0, field_types=first)


OUT = "leave it out of __getitem__"
AT_ONCE: dict[str, tuple[Callable[[int], Any], str]] = {
    "unlike shapes": (lambda i: {"x": torch.arange(3 + i)}, "is of shape (3,) and (4,): pad it to"),
    "arrays of unlike shapes": (
        lambda i: {"seq": np.zeros((2, 3 + i))},
        "field 'seq' of items 0 and 1 is of shape (2, 3) and (2, 4): pad it to one shape, or",
    ),
    "a str": (lambda i: {"x": X[i], "y": "a"}, f"field 'y' of item 0 is a str: {OUT}."),
    "bytes": (lambda i: {"x": b"abc"}, "field 'x' of item 0 is a bytes: leave it out"),
    "None": (lambda i: {"x": X[i], "y": None}, f"'y' of item 0 is None: {OUT}, or return a tensor"),
    "None later": (lambda i: {"x": None if i else 1.0}, "field 'x' of item 1 is None"),
    "a dict": (lambda i: {"x": {"y": X[i]}}, "field 'x' of item 0 is a dict: make a field of each"),
    "a list": (lambda i: {"x": [1, 2]}, "field 'x' of item 0 is a list: write torch.tensor(…)"),
    "an object": (lambda i: {"x": object()}, "field 'x' of item 0 is an object: make it a tensor"),
    "words": (lambda i: {"x": np.array(["a"])}, "is an array of dtype <U1: leave it out"),
    "a tuple": (lambda i: (X[i], i), "item 0 is a tuple: return a dict, {field: tensor}."),
    "a tensor": (lambda i: X[i], "item 0 is a Tensor: return a dict"),
    "nothing": (lambda i: None, "item 0 is None: return a dict"),
    "no fields": (lambda i: {}, "item 0 has no fields."),
    "a number as a name": (lambda i: {0: X[i]}, "field 0 of item 0 is not a name"),
    "a name of ours": (lambda i: {"@step": X[i]}, "field '@step' of item 0 is not a name"),
    "another field": (lambda i: {"x" if i else "y": X[i]}, "item 1 has no field 'y', which item 0"),
    "an error": (lambda i: {"x": X[i + 99]}, "IndexError: index 99 is out of bounds"),
}


@pytest.mark.parametrize(("make", "said"), AT_ONCE.values(), ids=AT_ONCE)
def test_it_is_one_error_with_field_and_item(make: Callable[[int], Any], said: str) -> None:
    with pytest.raises(RecipeError) as told:
        check_items(Made(make))
    assert told.value.where == "data._target_"
    assert said in told.value.problem


def test_an_item_that_raises_is_told_with_its_number_and_line() -> None:
    def broken(index: int) -> Any:
        raise FileNotFoundError(f"no image {index}")

    with pytest.raises(RecipeError) as told:
        check_items(Made(broken))
    lines = told.value.problem.splitlines()
    assert lines[:2] == ["FileNotFoundError: no image 0", "item 0 of the data set"]
    assert "test_odd_items.py" in lines[2] and "in broken: raise FileNotFoundError" in lines[2]


def test_numbers_and_arrays_are_taken_as_torch_takes_them() -> None:
    def make(i: int) -> dict[str, Any]:
        return {
            "whole": i,
            "real": i / 2,
            "flag": i % 2 == 0,
            "array": np.full((2, 3), i, dtype=np.int16),
            "scalar": np.float32(i),
            "trained": torch.nn.Parameter(X[i]),
        }

    data = Made(make)
    check_items(data)
    batch = Sampler(data=data, seed=0, batch_size=4, micro_batches=1, held_out=0)(0, 0, slice(0, 4))
    expected = torch.utils.data.default_collate([make(int(i)) for i in batch["whole"]])
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert batch[name].dtype == value.dtype and torch.equal(batch[name], value)
    assert not batch["trained"].requires_grad


LATER: dict[str, tuple[Callable[[int], Any], str]] = {
    "shape": (
        lambda i: {"x": X[i].repeat(1 + (i == 7)), "n": i},
        "field 'x' of items 7 and 5 is of shape (4,) and (2,): pad it to one shape",
    ),
    "shape of all": (
        lambda i: {"x": X[i].repeat(2), "n": i},
        "field 'x' of item {} is float32 of shape (4,); so far float32 of shape (2,)",
    ),
    "dtype": (
        lambda i: {"x": X[i].double() if i == 7 else X[i], "n": i},
        "field 'x' of item 7 is float64 of shape (2,); so far float32 of shape (2,)",
    ),
    "field": (lambda i: {"x": X[i]}, "item {} has no field 'n', which the first items have"),
    "None": (lambda i: {"x": X[i], "n": None if i == 7 else i}, "field 'n' of item 7 is None"),
}


@pytest.mark.parametrize(("make", "said"), LATER.values(), ids=LATER)
def test_items_that_differ_later_are_told(make: Callable[[int], Any], said: str) -> None:
    samples = sampler(make)
    step = next(k for k in range(5) if 7 in samples._chosen(k, 0, slice(0, 4)).tolist())
    first = samples._chosen(step, 0, slice(0, 4))[0]
    with pytest.raises(ItemError) as told:
        samples(step, 0, slice(0, 4))
    assert said.format(first) in str(told.value)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield {"x": X[0]}


class Endless(Made):
    def __len__(self) -> int:
        raise TypeError("it has no end")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Stream(), "Stream gives its items in turn"),
        (DataLoader(Made(lambda i: {"x": X[i]})), "DataLoader makes batches"),
        (iter([1]), "has no length or cannot be indexed"),
        (Endless(lambda i: {"x": X[i]}), "TypeError: it has no end"),
    ],
    ids=["stream", "loader", "iterator", "length"],
)
def test_what_is_no_map_of_items_is_refused_by_name(data: Any, said: str) -> None:
    with pytest.raises(RecipeError) as told:
        check_kind(data)
    assert said in told.value.problem


def test_fields_that_are_random_are_found() -> None:
    data = Made(lambda i: {"x": torch.rand(2), "y": X[i], "z": float("nan")})
    assert random_fields(data) == ["x"]


# ---- in mid-run ----------------------------------------------------------------------------------

ODD = """\
import torch
from samples import Samples


class Late(Samples):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        if self.read > 20:
            return self.late(item)
        return item


class Raises(Late):
    def late(self, item):
        raise OSError("no such image")


class Longer(Late):
    def late(self, item):
        return {**item, "images": torch.zeros(9)}


class Drawn(Samples):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        return {**item, "images": item["images"] + torch.rand(8)}
"""


@pytest.fixture(autouse=True)
def odd(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "odd", raising=False)  # it has the samples of another test
    (workplace / "odd.py").write_text(ODD)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raises", ["OSError: no such image", " of the data set", "odd.py:15 in late"]),
        ("Longer", ["ItemError: field 'images' of item", "float32 of shape (9,)"]),
    ],
)
def test_a_later_item_is_a_run_error_with_item_and_line(
    place: Path, name: str, said: list[str]
) -> None:
    recipe = load(["recipe=small", "launch=virtual", f"data._target_=odd.{name}", "eval.batches=0"])
    with pytest.raises(RunError) as told:
        run(recipe, place / "out")
    assert all(words in str(told.value) for words in said)


def test_random_items_are_noted_where_ranks_may_share_them(place: Path) -> None:
    from flowrun.launcher.job.job import Job

    given = ["recipe=small", "data._target_=odd.Drawn"]
    assert any("images of an item" in note for note in Job(load(given)).notes)
    alone = Job(load([*given, "placement.axes.tensor=1"]))
    assert not any("__getitem__" in note for note in alone.notes)


# ---- files ---------------------------------------------------------------------------------------


def test_a_fork_reads_at_a_position_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefgh")
    with (tmp_path / "text").open("rb", buffering=0) as opened:
        opened.seek(2)

        def read() -> tuple[bytes, int]:
            reopen_files()
            return opened.read(3), opened.fileno()

        assert run_in_fork(read) == (b"cde", opened.fileno())
        assert opened.tell() == 2


def test_files_that_are_written_stay_shared(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as opened:
        run_in_fork(lambda: (reopen_files(), os.write(opened.fileno(), b"abc"))[1])
        assert opened.tell() == 3


TEXT_FILE = """\
import torch

NUMBERS = bytes(range(64))


class Text:
    def __init__(self):
        with open("numbers.bin", "wb") as made:
            made.write(NUMBERS * 1000)
        self.file = open("numbers.bin", "rb", buffering=0)

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        self.file.seek(16 * index)
        found = torch.frombuffer(bytearray(self.file.read(16)), dtype=torch.uint8)
        expected = torch.tensor([(16 * index + k) % 64 for k in range(16)], dtype=torch.uint8)
        if not torch.equal(found, expected):
            raise ValueError("another sample's bytes")
        return {"images": found[:8] / 64, "labels": torch.tensor(index % 4)}
"""


@pytest.mark.processes
def test_ranks_read_one_open_file_each_for_itself(place: Path) -> None:
    (place / "text_file.py").write_text(TEXT_FILE)
    given = ["data={_target_: text_file.Text}", "placement.axes={data: 2}", "train.steps=100"]
    ended = Command(place, "recipe=small", *given, run_folder(place / "out")).end()
    assert (ended.status, ended.err) == (0, "")
    assert len(losses(place / "out")) == 100
