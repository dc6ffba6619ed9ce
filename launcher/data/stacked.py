"""Data sets that make many samples in one call: a gather of rows instead of a call a sample.

A batch of 1024 samples that are made one by one takes 3 to 7 ms of Python.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

DOCUMENTS, POSITIONS = "documents", "positions"  # fields of a sample that packs several documents
BYTES = "bytes"  # what ids stand for, in place of the digest of a tokenizer
Numbers = NDArray[np.int64]


class StackedDataset(Dataset[dict[str, Tensor]], ABC):
    """A map-style data set that defines `stacked` and `__len__`; items follow from `stacked`.

    unprepared: field -> the method that makes it from the index alone (launcher/data/steps.py).
    sample_seconds: seconds of a sample of a batch on one core, about, for the rehearsal.
    """

    unprepared: ClassVar[Mapping[str, str]] = {}
    sample_seconds: float = 0.0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items at indices (B,) int64, stacked: {field: (B, …)}."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = self.stacked(torch.tensor([index], device="cpu"))
        return {field: values[0] for field, values in batch.items()}


class Rows(StackedDataset):
    """A data set of tensors in memory; a sample is a row of each field.

    Raise ValueError for tensors of different lengths.
    """

    def __init__(self, **fields: Tensor) -> None:
        lengths = {name: len(values) for name, values in fields.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all fields must have one length; they have {lengths}")
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items by one gather a field."""
        return {name: values[indices] for name, values in self.fields.items()}
