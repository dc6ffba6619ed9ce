"""A data set whose items are tuples, as torchvision's are: their values get names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from flowrun.launcher.data.steps import sample_seconds


class NamedFields(Dataset[dict[str, Tensor]]):
    """Items of another data set as dicts.

    data: a map-style data set, whose items are tuples or lists, or one value each.
    names: of the values of an item, in their order.
    """

    def __init__(self, data: Any, names: Sequence[str]) -> None:
        self.data, self.names = data, tuple(names)
        self.sample_seconds = sample_seconds(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.data[index]
        values = item if isinstance(item, tuple | list) else (item,)
        if len(values) != len(self.names):
            raise ValueError(f"it has {len(values)} values, and {len(self.names)} names are given")
        return dict(zip(self.names, values, strict=True))
