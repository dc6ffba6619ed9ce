"""Data sets whose items are made in steps: read, decode, augment …

Such a data set is a pipeline: every step becomes an actor of each rank, with two registers between
one and the next (engine/lowering), so that the steps and compute run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flowrun.engine.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Step:
    """A method of the data set: value of the step before -> value; the first takes the index.

    seconds, num_bytes: of a sample, about: time on one core, and size of the result.
    random: the method takes a second argument, a numpy Generator.  It is None in evaluation, for
    which the method makes the typical choice (crop the middle, do not mirror).
    """

    name: str
    seconds: float = 0.0
    num_bytes: int = 0
    random: bool = False


class StepwiseDataset(Dataset[dict[str, Tensor]]):
    """A map-style data set whose items are made by `steps`; the last returns a dict of tensors.

    unprepared: field -> the method that makes it from the index alone, as the steps would.  A
    pipeline stage that reads only such fields runs no step.
    """

    steps: tuple[Step, ...]
    unprepared: ClassVar[Mapping[str, str]] = {}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        value: object = index
        for step in self.steps:
            value = apply_step(self, step.name, value, None)
        item: dict[str, Tensor] = value  # type: ignore[assignment]
        return item


class TwoViews(StepwiseDataset):
    """Items of a data set with a field (2, …) in the place of one (…): two views of it.

    Each view hides a share of the values, drawn again in every epoch.
    """

    steps = (Step("read"), Step("hide", random=True))

    def __init__(
        self, data: Dataset[Mapping[str, Tensor]], field: str = "images", share: float = 0.25
    ) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"share is {share}: a view hides from 0 to less than 1 of a sample")
        if field not in (item := data[0]):
            problem = f"items have no field {field!r}."
            raise ArgumentError("field", problem, f"There is: {', '.join(item)}.")
        self.data, self.field, self.share = data, field, share

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def read(self, index: int) -> tuple[int, Mapping[str, Tensor]]:
        """Return the item of the other data set, with its number."""
        return index, self.data[index]

    def hide(
        self, sample: tuple[int, Mapping[str, Tensor]], draws: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return the item with two views; in evaluation its number draws them."""
        index, item = sample
        twice = torch.stack([item[self.field]] * 2)
        chances = (draws or np.random.default_rng(index)).random(twice.shape)
        return {**item, self.field: twice * torch.from_numpy(chances >= self.share)}


def preparation(data: object) -> tuple[Step, ...]:
    """Return the steps of a data set; () for one that makes an item in one call."""
    return tuple(getattr(data, "steps", ()))


def unprepared_fields(data: object) -> Mapping[str, str]:
    """Return field -> method that makes it from the index, without the rest of the sample."""
    return dict(getattr(data, "unprepared", {}))


def sample_seconds(data: object) -> float:
    """Return the seconds of a sample on one core, if the data set states them."""
    return float(getattr(data, "sample_seconds", 0.0))


def apply_step(data: Any, name: str, value: object, seed: tuple[int, ...] | None) -> object:
    """Run a step on what the one before made.  seed: of a random step; None: its typical choice."""
    step = next(s for s in data.steps if s.name == name)
    method = getattr(data, name)
    if not step.random:
        return method(value)
    return method(value, None if seed is None else np.random.default_rng(seed))
