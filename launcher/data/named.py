"""Data sets around another: one whose items are no dicts of tensors, or that gives its items in
turn.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from flowrun.launcher.data.collate import ItemError, differing_fields
from flowrun.launcher.data.steps import sample_seconds

D = TypeVar("D")


class Streamed(Dataset[object]):
    """Gives the items of an iterable data set by number, in its own order: the same in each epoch.

    A rank reads past the items of others, and one that begins later past all before, by `skip`
    where the data set has it.  data: gives the same items each time.  length: how many count; None:
    as many as its len() says.  kept: newest items that stay in memory.
    """

    in_order = True  # the order of an epoch

    def __init__(self, data: Iterable[object], length: int | None = None, kept: int = 256) -> None:
        self.data, self._most, self._lock = data, max(1, kept), threading.Lock()
        self._length = len(data) if length is None else length  # type: ignore[arg-type]
        self._first: list[object] = []
        self._kept: dict[int, object] = {}
        self._left: Iterator[object] = iter(())
        self._next = self._length

    @staticmethod
    def around(data: D) -> D:
        """Return a data set, one that is iterable and has a length by number."""
        is_stream = isinstance(data, IterableDataset) and hasattr(data, "__len__")
        return cast("D", Streamed(cast("Iterable[object]", data))) if is_stream else data

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what a user may not expect."""
        name = type(self.data).__name__
        return (f"data: {name} gives its items in turn: they are not shuffled, in any epoch",)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> object:
        with self._lock:
            if index not in self._kept and not self._next <= index < self._next + self._most:
                self._open(index)
            while index not in self._kept:
                try:
                    self._kept[self._next] = next(self._left)
                except StopIteration:
                    problem = f"it ends after {self._next} items, and its length is {len(self)}"
                    raise ItemError(problem) from None
                self._kept.pop(self._next - self._most, None)
                self._next += 1
            return self._kept[index]

    def _open(self, index: int) -> None:
        """Read it again up to an item.  Raise ItemError if its first items are not the same."""
        skip = getattr(self.data, "skip", None)
        self._first = self._first or [*islice(iter(self.data), 2)]
        pairs = zip(self._first, islice(iter(self.data), 2), strict=False)
        if any(differing_fields(*map(_tensors, pair)) for pair in pairs):
            problem = "its first items change with each iteration, or from process to process"
            raise ItemError(
                f"{problem}: give each the same, and leave it to flowrun to divide them"
            )
        self._left = iter(skip(index)) if skip else islice(iter(self.data), index, None)
        self._kept, self._next = {}, index


def _tensors(item: object) -> dict[str, Tensor]:
    made = ((path, as_tensor(value)) for path, value in values_of(item))
    return {path: value for path, value in made if value is not None}


class NamedFields(Dataset[dict[str, object]]):
    """Items of another data set as dicts: tuples, lists, dataclasses, dicts, or one value each.

    data: a data set, map-style or iterable with a length.  names: of the values of an item, in
    their order, null for one that is left out; or of each field the path of its value: {x: image,
    age: patient.age}.  Values become tensors (as_tensor).
    """

    def __init__(self, data: Any, names: Sequence[str | None] | Mapping[str, str]) -> None:
        self.data = Streamed.around(data)
        self.names = names if isinstance(names, Mapping) else (*names,)
        self.sample_seconds = sample_seconds(data)
        self.in_order, self.notes = is_in_order(self.data), getattr(self.data, "notes", ())

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, object]:
        values, names = dict(values_of(self.data[index])), self.names
        if not isinstance(names, Mapping):
            if len(values) != len(names):
                raise ValueError(f"it has {len(values)} values, and {len(names)} names are given")
            names = {name: path for name, path in zip(names, values, strict=True) if name}
        named = {name: values[path] for name, path in names.items()}
        tensors = ((name, as_tensor(value)) for name, value in named.items())
        # collate says what is wrong with what makes no tensor
        return named | {name: tensor for name, tensor in tensors if tensor is not None}


def is_in_order(data: object) -> bool:
    """Return whether a data set has an order of its own."""
    return bool(getattr(data, "in_order", False))


def values_of(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (path, value) of each value of an item: "label", "1", "0.image"; "" if it is one.

    A list of numbers is one value, unless it is the item.
    """
    parts: Mapping[object, object] = {}
    if isinstance(value, Mapping):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, tuple | list) and not (path and as_tensor(value) is not None):
        parts = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if not parts:
        yield path, value
    for key, part in parts.items():
        yield from values_of(part, f"{path}.{key}" if path else str(key))


def as_tensor(value: object) -> Tensor | None:
    """Return a number, an array, a list of numbers or an image of PIL as a tensor; None of others.

    float64 becomes float32; a grey or RGB image (C, H, W) from 0 to 1, one of another mode, such as
    a mask, (H, W) of its numbers.
    """
    if hasattr(value, "getbands"):
        pixels = torch.as_tensor(np.array(value))
        if getattr(value, "mode", "") in ("RGB", "RGBA", "L", "LA"):
            return pixels.view(*pixels.shape[:2], -1).permute(2, 0, 1) / 255
        return pixels if pixels.is_floating_point() else pixels.long()
    if isinstance(value, bool | int | float | list | tuple | np.ndarray | np.generic):
        try:
            value = torch.as_tensor(np.asarray(value))
        except (TypeError, ValueError):  # words, or lists of unlike lengths
            return None
    if not isinstance(value, Tensor):
        return None
    return value.float() if value.dtype == torch.float64 else value
