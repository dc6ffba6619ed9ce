"""A data set whose items are no dicts of tensors: their values get names, and become tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flowrun.launcher.data.steps import sample_seconds


class NamedFields(Dataset[dict[str, object]]):
    """Items of another data set as dicts: tuples, lists, dataclasses, dicts, or one value each.

    data: a map-style data set.  names: of the values of an item, in their order, null for one that
    is left out; or of each field the path of its value: {x: image, age: patient.age}.  Values
    become tensors (as_tensor).
    """

    def __init__(self, data: Any, names: Sequence[str | None] | Mapping[str, str]) -> None:
        self.data, self.names = data, names if isinstance(names, Mapping) else (*names,)
        self.sample_seconds = sample_seconds(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, object]:
        values, names = dict(values_of(self.data[index])), self.names
        if not isinstance(names, Mapping):
            if len(values) != len(names):
                raise ValueError(f"it has {len(values)} values, and {len(names)} names are given")
            names = {name: path for name, path in zip(names, values, strict=True) if name}
        tensors = {name: as_tensor(values[path]) for name, path in names.items()}
        return {  # collate says what is wrong with what makes no tensor
            name: values[names[name]] if tensor is None else tensor
            for name, tensor in tensors.items()
        }


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
