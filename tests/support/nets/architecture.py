"""What an architecture is, to be trained in every layout beside a plain torch loop."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.strategy import Optimizer
from support.layouts.grids import Layout
from support.layouts.plain_loop import (
    Batch,
    Measure,
    Trained,
    Training,
    largest,
    loss_difference,
    pins,
    seeded,
    sgd,
)

SGD = sgd(0.1, 0.9, 1e-3)  # as a rule, and not AdamW, which would hide a gradient of wrong length
BOUND = 1e-4  # of a loss, relative; of a weight, as a share of the way that training moved it
STEPS, SAMPLES, MICRO_BATCHES = 3, 8, 2


PINNED = "tensor 2, pinned"
LAYOUTS = {
    "data 2": Layout(data=2),
    "tensor 2": Layout(tensor=2, pinned=False),
    PINNED: Layout(tensor=2),
    "stages 2": Layout(stages=2),
    "data 2, ZeRO 2": Layout(data=2, zero=2),
}


def own_loss(output: Any, batch: Batch) -> Tensor:
    """The loss that the model took from its labels."""
    return output.loss


@dataclass(frozen=True)
class Architecture:
    """What is built and what it is fed.

    make: a model with a number of layers.  batch: field -> tensor, from a generator and a number
    of samples; all samples have as many labels, so that the mean over a batch is the mean of its
    micro-batches' means.  split: weight pattern -> dim: the customary layout on the axis tensor.
    inputs: argument -> field; empty: of the same names.  micro_batches: 1 where batch norm takes
    statistics of each.  zero: stage that every layout has; each is then data parallel too.
    """

    name: str
    make: Callable[[int], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    split: Mapping[str, int]
    inputs: Mapping[str, str] = field(default_factory=dict)
    loss: Measure = own_loss
    optimizer: Optimizer = SGD
    micro_batches: int = MICRO_BATCHES
    zero: int = 0

    def training(self, layers: int = 1) -> Training:
        generator = torch.Generator().manual_seed(3)
        batches = tuple(self.batch(generator, SAMPLES) for _ in range(STEPS))
        return Training(
            partial(_model, self.make, layers),
            self.inputs or {name: name for name in batches[0]},
            self.loss,
            batches,
            self.optimizer,
            self.micro_batches,
            pins(self.split),
        )

    def layout(self, layout: Layout) -> Layout:
        """The layout, with the ZeRO that this architecture always has."""
        return replace(layout, data=2, zero=self.zero) if self.zero else layout


@dataclass(frozen=True)
class Apart:
    """Largest relative difference of a step's loss; largest difference of a weight, as a share of
    the way that training moved it.
    """

    loss: float
    weight: float

    def __str__(self) -> str:
        return f"{self.loss:.0e} / {self.weight:.0e}"

    def within(self, loss: float, weight: float) -> bool:
        """Whether neither is larger; nan is."""
        return self.loss <= loss and self.weight <= weight


def _model(make: Callable[[int], nn.Module], layers: int) -> nn.Module:
    """The model, the same at every call."""
    return seeded(partial(make, layers)).train()


def apart(found: Sequence[float], weights: Mapping[str, Tensor], plain: Trained) -> Apart:
    """Of a run, from a plain loop.

    Some weights never move, such as the bias of keys, to which softmax is blind: none counts as
    having moved less than a thousandth of the way of all together.  A weight that the loss does not
    reach is none of the run's, and must have stayed in the plain loop too.
    """
    moved = {name: float((w - plain.before[name]).norm()) for name, w in plain.after.items()}
    least = 1e-3 * math.sqrt(sum(way * way for way in moved.values()))
    given = {**plain.before, **weights}
    ways = (float((given[n] - plain.after[n]).norm()) / max(w, least) for n, w in moved.items())
    return Apart(loss_difference(found, plain), largest(ways))


def in_double(training: Training) -> Training:
    """The same in fp64, where nothing hides behind rounding: relu and batch norm over few values
    make much of a last bit.  The rate is fp32's in both, which a run feeds.
    """
    numbers = dict(training.optimizer.arguments)
    rate = float(torch.tensor(numbers["lr"]))
    return replace(
        training,
        model=partial(_in_double, training.model),
        batches=tuple(map(_doubled, training.batches)),
        optimizer=replace(training.optimizer, arguments=tuple((numbers | {"lr": rate}).items())),
    )


def _in_double(make: Callable[[], nn.Module]) -> nn.Module:
    return make().double()


def _doubled(batch: Batch) -> Batch:
    return {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
