"""Windows of a stream of ids, for models that predict the next id."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.stacked import StackedDataset


class Windows(StackedDataset):
    """{tokens (T,), targets (T,)}, int64, targets one id ahead; windows do not overlap.

    stream: ids (N,) of any integer dtype, in memory or mapped.  length: T, less than N.  of: what
    the ids are and where they come from, for an error.
    """

    def __init__(self, stream: NDArray[np.integer], length: int, of: str = "ids") -> None:
        if len(stream) <= length:
            problem = f"{len(stream)} {of} do not fill a window of {length} + 1."
            raise ArgumentError("length", problem)
        every = np.lib.stride_tricks.sliding_window_view(stream, length + 1)
        self.windows = every[::length]  # a view: nothing is read

    def __len__(self) -> int:
        return len(self.windows)

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items; both fields are views of the same windows."""
        windows = torch.from_numpy(self.windows[indices.numpy()].astype(np.int64))
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
