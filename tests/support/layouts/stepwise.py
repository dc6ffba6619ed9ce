"""Digits' shapes made in three steps, to be trained on as a chain of actors."""

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Compilation
from flowrun.engine.strategy import Preparation
from flowrun.launcher.data.sampler import Sampler
from flowrun.launcher.data.steps import Step, StepwiseDataset
from support.layouts.grids import Layout, example, strategy, task
from support.layouts.plain_loop import TINY_MLP, Training


class Noisy(StepwiseDataset):
    """The last of the three steps is random.  done: acts of each step, counted."""

    unprepared: ClassVar = {"labels": "label"}

    def __init__(self) -> None:
        self.steps = (
            Step("read", 1e-3, 8),
            Step("decode", 2e-3, 256),
            Step("augment", 0.0, 256, True),
        )
        self.done: Counter[str] = Counter()

    def __len__(self) -> int:
        return 40

    def label(self, index: int) -> Tensor:
        return torch.tensor(index % 10)

    def read(self, index: int) -> int:
        self.done["read"] += 1
        return index

    def decode(self, index: int) -> tuple[Tensor, int]:
        self.done["decode"] += 1
        draws = torch.Generator().manual_seed(index)
        return torch.rand(64, generator=draws), index % 10

    def augment(
        self, sample: tuple[Tensor, int], draws: np.random.Generator | None
    ) -> dict[str, Tensor]:
        self.done["augment"] += 1
        noise = 0.0 if draws is None else float(draws.random())
        return {"images": sample[0] + noise, "labels": torch.tensor(sample[1])}


def sampler(data: StepwiseDataset, evaluation: bool = False) -> Sampler:
    return Sampler(
        data=data,
        seed=5,
        batch_size=16,
        micro_batches=TINY_MLP.micro_batches,
        held_out=8,
        evaluation=evaluation,
    )


@dataclass(frozen=True, eq=False)
class Stepwise(Training):
    """A training whose samples come from Noisy."""

    @property
    def rows(self) -> Sampler:  # type: ignore[override]
        """What makes the samples of a step, one step after the other."""
        return sampler(Noisy())


STEPWISE_MLP = Stepwise(**{f.name: getattr(TINY_MLP, f.name) for f in fields(TINY_MLP)})


@lru_cache
def plan(layout: Layout, chain: bool = True) -> Plan:
    wanted = strategy(TINY_MLP, layout)
    named = Noisy().steps if chain else ()
    steps = tuple(Preparation(s.name, s.seconds, s.num_bytes) for s in named)
    told = {"unprepared": tuple(Noisy.unprepared), "sample_s": 3e-3}
    wanted = replace(wanted, preparation=steps, **told)
    return Compilation(task(TINY_MLP), example(TINY_MLP), wanted).training.plan
