"""What an architecture is, to be trained in every layout beside a plain torch loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.strategy import Optimizer
from support.layouts import Layout
from support.plain_loop import Batch, Measure, Trained, Training, largest, pins, seeded

LOSS_TOLERANCE = 1e-5
STEPS, SAMPLES, MICRO_BATCHES = 5, 8, 2
SGD = Optimizer(
    "sgd", (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 1e-3), ("nesterov", False))
)

PINNED = "tensor 2, pinned"
LAYOUTS = {
    "data 2": Layout(data=2),
    "tensor 2": Layout(tensor=2),
    PINNED: Layout(tensor=2),
    "stages 2": Layout(stages=2),
    "data 2 x stages 2, ZeRO 2": Layout(data=2, stages=2, zero=2),
}


def own_loss(output: Any, batch: Batch) -> Tensor:
    """The loss that the model took from its labels."""
    loss: Tensor = output.loss
    return loss


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
        """Five steps.  SGD as a rule: AdamW would hide a gradient of wrong length."""
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


def _model(make: Callable[[int], nn.Module], layers: int) -> nn.Module:
    """The model, the same at every call."""
    return seeded(partial(make, layers)).train()


def weights_apart(found: Mapping[str, Tensor], plain: Trained) -> float:
    """Largest difference of a weight, as a share of the way that training moved it.

    Some never move, such as the bias of keys, to which softmax is blind: none counts as having
    moved less than a thousandth of the way of all together.
    """
    moved = {name: float((w - plain.before[name]).norm()) for name, w in plain.after.items()}
    least = 1e-3 * math.sqrt(sum(way * way for way in moved.values()))
    return largest(
        float((found[n] - plain.after[n]).norm()) / max(w, least) for n, w in moved.items()
    )
