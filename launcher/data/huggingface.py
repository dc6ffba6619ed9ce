"""Data sets of Hugging Face's `datasets`, from a folder that save_to_disk wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.stacked import StackedDataset


class HuggingFace(StackedDataset):
    """Columns of a saved data set as tensors (pip install flowrun[huggingface]).

    path: the folder.  split: name of a split, if the folder holds a DatasetDict.
    fields: field of the batch -> column; None: every column under its own name.  Columns hold
    numbers, or nested lists of numbers with the same lengths in all rows.
    """

    def __init__(
        self, path: str, split: str | None = None, fields: Mapping[str, str] | None = None
    ) -> None:
        import datasets

        if not Path(path).expanduser().is_dir():
            raise ArgumentError("path", f"there is no folder {path}.")
        found = datasets.load_from_disk(str(Path(path).expanduser()))
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                splits = ", ".join(found)
                raise ArgumentError("split", f"it must be one of {splits}, not {split!r}.")
            found = found[split]
        known = found.column_names
        self.fields = dict(fields or {name: name for name in known})
        missing = [column for column in self.fields.values() if column not in known]
        if missing:
            problem = f"{path} has no column {missing[0]!r}; it has {', '.join(known)}."
            raise ArgumentError("fields", problem)
        self.rows = found.select_columns(list(dict.fromkeys(self.fields.values())))

    def __len__(self) -> int:
        return len(self.rows)

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items, read in one call of `datasets`, as each call converts columns."""
        rows = self.rows[indices.tolist()]
        return {field: _tensor(rows[column]) for field, column in self.fields.items()}


def _tensor(values: object) -> Tensor:
    """Return numbers as a tensor, floating-point ones as float32."""
    made = torch.from_numpy(np.asarray(values))
    return made.float() if made.is_floating_point() else made
