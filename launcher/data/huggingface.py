"""Data sets of Hugging Face's `datasets`, from a folder that save_to_disk wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.stacked import StackedDataset
from flowrun.launcher.urls.url_cache import data_on_disk

if TYPE_CHECKING:
    from datasets import Dataset


class HuggingFace(StackedDataset):
    """Columns of a saved data set as tensors (pip install flowrun[huggingface]).

    path: the folder, or a URL of one, which is copied.  split: name of a split, if the folder holds
    a DatasetDict.
    fields: field of the batch -> column; None: every column under its own name.  Columns hold
    numbers, or nested lists of numbers with the same lengths in all rows.
    """

    def __init__(
        self, path: str, split: str | None = None, fields: Mapping[str, str] | None = None
    ) -> None:
        saved = load_saved(path, split)
        self.fields = choose_fields(fields, saved.column_names, path)
        self.rows = saved.select_columns(list(dict.fromkeys(self.fields.values())))

    def __len__(self) -> int:
        return len(self.rows)

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items, read in one call of `datasets`, as each call converts columns."""
        rows = self.rows[indices.tolist()]
        return {field: _tensor(rows[column]) for field, column in self.fields.items()}


def choose_fields(
    fields: Mapping[str, str] | None, known: Sequence[str], path: str
) -> dict[str, str]:
    """Return field -> column, of all columns if none are given.  Raises ArgumentError."""
    chosen = dict(fields or {name: name for name in known})
    missing = [column for column in chosen.values() if column not in known]
    if missing:
        problem = f"{path} has no column {missing[0]!r}; it has {', '.join(known)}."
        raise ArgumentError("fields", problem)
    return chosen


def load_saved(path: str, split: str | None) -> Dataset:
    """Return a saved data set, or the split of several.  Raise ArgumentError where it is not."""
    import datasets

    folder = data_on_disk(path)
    if not folder.is_dir():
        raise ArgumentError("path", f"there is no folder {path}.")
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ArgumentError("split", f"it must be one of {', '.join(saved)}, not {split!r}.")
        return saved[split]
    if split not in (None, saved.split):
        one = "has no splits" if saved.split is None else f"holds the split {saved.split} alone"
        problem = f"{path} {one}, so split={split} cannot be read."
        raise ArgumentError("split", problem, "Leave out data.split.")
    return saved


def _tensor(values: object) -> Tensor:
    """Return numbers as a tensor, floating-point ones as float32."""
    tensor = torch.from_numpy(np.asarray(values))
    return tensor.float() if tensor.is_floating_point() else tensor
