"""Items made in steps: read, decode, augment …, so that each runs beside the others and beside
compute.

A data set that names its steps is a pipeline: every step becomes an actor of each rank, with two
registers between one and the next (engine/lowering/lower.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True)
class Step:
    """A method of the data set: value of the step before -> value.  The first is given the index.

    seconds, num_bytes: of one sample, about: time on one core, and size of what it returns.
    random: the method takes a second argument, a numpy Generator; None in evaluation, where it is
    to do what is most usual (cut out the middle, do not mirror).
    """

    name: str
    seconds: float = 0.0
    num_bytes: int = 0
    random: bool = False


class StepwiseDataset(Dataset[dict[str, Tensor]]):
    """A map-style data set whose items are made by `steps`; the last returns a dict of tensors.

    unprepared: field -> the method that makes it of the index alone, as the steps would.  A
    pipeline stage that reads no other field does no step.
    """

    steps: tuple[Step, ...]
    unprepared: ClassVar[Mapping[str, str]] = {}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        value: Any = index
        for step in self.steps:
            value = apply(self, step.name, value, None)
        return value


def preparation(data: Any) -> tuple[Step, ...]:
    """The steps that a data set names; none for one that makes its items at once."""
    return tuple(getattr(data, "steps", ()))


def unprepared(data: Any) -> Mapping[str, str]:
    """Fields that can be had without the rest of their samples, each with the method that makes it
    of the index alone.
    """
    found: Mapping[str, str] = getattr(data, "unprepared", {})
    return found


def sample_seconds(data: Any) -> float:
    """Of one sample that is made at once, on one core, as the data set says; 0: nothing is said."""
    return float(getattr(data, "sample_seconds", 0.0))


def apply(data: Any, name: str, value: Any, seed: tuple[int, ...] | None) -> Any:
    """One step of one sample.  seed: of what is random in it; None: nothing is."""
    step = next(s for s in data.steps if s.name == name)
    method = getattr(data, name)
    if not step.random:
        return method(value)
    return method(value, None if seed is None else np.random.default_rng(seed))
