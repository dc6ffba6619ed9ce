"""Samples made many at once: rows of a tensor are one gather, not a call and a view a sample.

A batch of 1024 samples made one by one takes 3 to 7 ms of Python, in a thread beside compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flowrun.models.data.collate import collated, item_of


class StackedDataset(Dataset[dict[str, Tensor]], ABC):
    """A map-style data set that writes `stacked` and `__len__`; its items follow from them.

    unprepared: field -> the method that makes it of the index alone (models/data/steps.py).
    sample_seconds: of one sample among many, about: time on one core, for what is foreseen.
    """

    unprepared: ClassVar[Mapping[str, str]] = {}
    sample_seconds: float = 0.0

    @abstractmethod
    def __len__(self) -> int:
        """Samples."""

    @abstractmethod
    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """The items of the indices (B,) int64, one after the other: {field: (B, …)}."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = self.stacked(torch.tensor([index], device="cpu"))
        return {field: values[0] for field, values in batch.items()}


class Rows(StackedDataset):
    """Fields are tensors that are kept; a sample is a row of each.  Raises ValueError for tensors
    of unlike lengths.
    """

    def __init__(self, **fields: Tensor) -> None:
        lengths = {name: len(values) for name, values in fields.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"fields of one length are needed; they have {lengths}")
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """One gather a field."""
        return {name: values[indices] for name, values in self.fields.items()}


def batch_of(data: Dataset[Any], indices: Tensor) -> dict[str, Tensor]:
    """Items of any map-style data set, stacked: {field: (B, …)}.

    By its `stacked`; else by its `__getitems__` (torch's: a list of items); else one by one.  What
    the data set raises says of which items; raises ItemError where they make no batch.
    """
    chosen = indices.tolist()
    stacked = _method(data, "stacked")
    if stacked:
        return _told(chosen, lambda: stacked(indices))  # type: ignore[no-any-return]
    many = _method(data, "__getitems__")
    items = _told(chosen, lambda: many(chosen)) if many else [item_of(data, k) for k in chosen]
    return collated(items, chosen)


def _told(chosen: list[int], make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        shown = ", ".join(map(str, chosen[:3])) + (" …" if len(chosen) > 3 else "")
        error.add_note(f"items {shown} of the data set")
        raise


def many_at_once(data: Dataset[Any]) -> str | None:
    """The method by which `batch_of` makes many items in one call; None: one by one."""
    return next((name for name in ("stacked", "__getitems__") if _method(data, name)), None)


def _method(data: Dataset[Any], name: str) -> Callable[[Any], Any] | None:
    """A tensor that a data set keeps under this name is none."""
    found = getattr(data, name, None)
    return found if callable(found) else None
