"""Layouts: the same training on many grids of ranks, compiled and run on the virtual cluster.

Compiling takes most of the time: plans and runs are kept for all test files of a session.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import pytest
from torch import Tensor

from flowrun.engine.actors.plan import Plan
from flowrun.engine.capture.capture import Task, capture, capture_evaluation
from flowrun.engine.compile import Rehearsed, plan_evaluation, plan_training
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.placement import Placement
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.kernels.kernels import Kernels, eager_kernels
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes
from flowrun.engine.strategy import Recompute, Strategy, Zero
from support.layouts.logical import put_together
from support.layouts.plain_loop import (
    STEPS,
    Batch,
    Training,
    loss_difference,
    plain_evaluation,
    plain_loop,
    weight_difference,
)

LOSS_TOLERANCE = 1e-5  # relative: float32 sums taken in another order (measured: 3e-7)
# Of a weight, as a share of the way that training moved it (measured: 1e-6 and 6e-5): AdamW divides
# a gradient by its own size, rounding errors included.
WEIGHT_TOLERANCE = {"sgd": 1e-5, "adamw": 1e-3}


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks along each axis, as a recipe says it.

    zero: stage, on axis data.  grids: (data, tensor) of each stage, where they are unlike.
    shared: the ranks share memory.  pinned: with the pins of the training, on axis tensor.
    context: ranks that divide the length of samples.  attention: how it reads that.
    room: slots of tokens that travel to their experts.
    """

    data: int = 1
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    zero: int = 0
    clip_norm: float = 0.0
    in_flight: int | str = "zero_bubble"
    register_slots: int = 2
    grids: tuple[tuple[int, int], ...] = ()
    recompute: Recompute = field(default_factory=Recompute)
    reduce_in_fp32: bool = False
    accumulate_in_fp32: bool = True
    shared: bool = False
    pinned: bool = True
    context: int = 1
    attention: str = "auto"
    room: float = 0.0

    @property
    def num_ranks(self) -> int:
        return sum(data * self.context * tensor for data, tensor in self._grids)

    @property
    def _grids(self) -> tuple[tuple[int, int], ...]:
        return self.grids or ((self.data, self.tensor),) * self.stages

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that are more than 1 wide in some stage."""
        data, tensor = (max(sizes) for sizes in zip(*self._grids, strict=True))
        widest = {"data": data, "context": self.context, "tensor": tensor}
        return tuple(axis for axis, size in widest.items() if size > 1)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of each stage: consecutive ranks."""
        out: list[Placement] = []
        first = 0
        for data, tensor in self._grids:
            sizes = {"data": data, "context": self.context, "tensor": tensor}
            ranks = tuple(range(first, first + data * self.context * tensor))
            out.append(Placement(tuple((a, sizes[a]) for a in self.axes), ranks))
            first += len(ranks)
        return tuple(out)

    def __str__(self) -> str:
        sizes = {"data": self.data, "context": self.context, "tensor": self.tensor}
        sizes |= {"stages": self.stages}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words += [f"chunks {self.chunks}"] if self.chunks > 1 else []
        words += [f"ZeRO {self.zero}"] if self.zero else []
        words += [f"stages of {self.grids}"] if self.grids else []
        words += ["in shared memory"] if self.shared else []
        words += [self.attention] if self.attention != "auto" else []
        words += ["clipped"] if self.clip_norm else []
        words += ["recomputed"] if self.recompute.modules else []
        words += [f"keep {' '.join(self.recompute.keep)}"] if self.recompute.keep else []
        return " x ".join(words) or "single"


# one of each kind
FIVE = (Layout(), Layout(data=2), Layout(tensor=2), Layout(stages=2), Layout(data=2, zero=3))


CLIP = 0.5  # below the norm of every step's gradient, of the tiny GPT
# data, tensor, stages, chunks, zero
_SIZES = (
    *((1,), (2,), (4,), (1, 2), (1, 4), (1, 1, 2), (1, 1, 4)),
    *((2, 2), (1, 2, 2), (1, 2, 2, 2), (2, 1, 2), (2, 2, 2)),
    *((4, 1, 1, 1, zero) for zero in (1, 2, 3)),
    *((2, 2, 1, 1, zero) for zero in (1, 2, 3)),
)
_SHARED = ((4, 1, 1, 1, 1), (2, 2, 1, 1, 3), (2, 1, 2, 1, 1))
LAYOUTS = (
    *(Layout(*sizes, clip_norm=CLIP) for sizes in _SIZES),
    *(Layout(*sizes, clip_norm=CLIP, shared=True) for sizes in _SHARED),
    Layout(clip_norm=CLIP, grids=((1, 2), (2, 2))),
)


def strategy(training: Training, layout: Layout) -> Strategy:
    """What the recipe would say.  ZeRO shards what has at least 64 elements: tiny models too."""
    return Strategy(
        layout.axes,
        layout.placements,
        layout.chunks,
        pins=training.pins if layout.pinned and "tensor" in layout.axes else (),
        zero=Zero("data", layout.zero, 64) if layout.zero else Zero(),
        recompute=layout.recompute,
        loss_scale=training.loss_scale,
        reduce_in_fp32=layout.reduce_in_fp32,
        accumulate_in_fp32=layout.accumulate_in_fp32,
        optimizer=replace(training.optimizer, clip_norm=layout.clip_norm),
        micro_batches=training.micro_batches,
        in_flight=layout.in_flight,
        register_slots=layout.register_slots,
        shared_memory=layout.shared,
        long_attention=layout.attention,
        expert_room=layout.room,
    )


def task(training: Training) -> Task:
    """The model with how the batch enters and what is made of the output."""
    return Task(
        training.model(),
        training.inputs,
        training.loss,
        training.metrics,
        autocast=training.autocast,
        narrow_residual=training.narrow_residual,
    )


def example(training: Training) -> Batch:
    return training.rows(0, 0, slice(0, training.micro_batch))


@lru_cache(maxsize=256)
def compiled(training: Training, layout: Layout) -> Rehearsed:
    return plan_training(captured(training), strategy(training, layout))


@lru_cache(maxsize=64)
def captured(training: Training) -> LogicalGraph:
    """What is computed of a micro-batch: the same in every layout."""
    return capture(task(training), example(training))


@lru_cache(maxsize=256)
def compiled_evaluation(training: Training, layout: Layout) -> Rehearsed:
    """The evaluation plan that goes with the training plan."""
    plan = compiled(training, layout).plan
    return plan_evaluation(captured_evaluation(training), strategy(training, layout), plan)


@lru_cache(maxsize=64)
def captured_evaluation(training: Training) -> LogicalGraph:
    """What is computed of a micro-batch to evaluate it: the same in every layout."""
    return capture_evaluation(task(training), example(training))


def initial(training: Training) -> dict[str, Tensor]:
    """Logical values of parameters and buffers before the first step."""
    model = training.model()
    values = {**dict(model.named_buffers()), **model.state_dict()}  # buffers kept out of it too
    return {name: value.detach() for name, value in values.items()}


def cluster(
    training: Training, plan: Plan, order_seed: int | None = None, kernels: Kernels = eager_kernels
) -> VirtualCluster:
    """A virtual cluster that checks the protocol's invariants if messages come in random order."""
    check = order_seed is not None
    return VirtualCluster(plan, training.rows, initial(training), order_seed, check, kernels)


Shards = Mapping[int, Mapping[str, Tensor]]  # rank -> tensor of the graph -> what the rank holds


def logical_weights(plan: Plan, shards: Shards, states: bool = False) -> dict[str, Tensor]:
    """Parameters (and states) by name, from what ranks hold; fails where copies differ in a bit."""
    out = {}
    for v in plan.variables.values():
        if (states or v.kind != "state") and not v.own:
            placement = plan.placements[v.stage]
            pieces = {rank: shards[rank][v.tensor] for rank in placement.ranks}
            shape = plan.tensors[v.tensor].shape
            out[v.name] = put_together(pieces, v.nd_sbp, placement, shape)
    return out


def weights_of(ranks: VirtualCluster, states: bool = False) -> dict[str, Tensor]:
    shards = {k: rank.variables for k, rank in ranks.ranks.items()}
    return logical_weights(ranks.plan, shards, states)


@dataclass(frozen=True)
class Run:
    """What a run left.

    sent_bytes: by actor, of all ranks and steps.  most_live: (rank, register) -> versions live at
    once, at most.
    """

    plan: Plan
    losses: tuple[float, ...]
    weights: Mapping[str, Tensor]
    sent_bytes: Mapping[int, int]
    most_live: Mapping[tuple[int, int], int]


@lru_cache(maxsize=256)
def virtual_run(training: Training, layout: Layout, steps: int = STEPS) -> Run:
    return run_plan(training, compiled(training, layout).plan, steps)


def run_plan(
    training: Training,
    plan: Plan,
    steps: int,
    order_seed: int | None = None,
    kernels: Kernels = eager_kernels,
) -> Run:
    """Train by a given plan on the virtual cluster."""
    ranks = cluster(training, plan, order_seed, kernels)
    results = ranks.run(steps)
    return Run(
        plan,
        tuple(result["loss"] for result in results),
        weights_of(ranks),
        dict(ranks.sent_bytes),
        {(k, r): most for k, rank in ranks.ranks.items() for r, most in rank.most_live.items()},
    )


def live_bytes(training: Training, plan: Plan, steps: int) -> int:
    """Most bytes of tensors at once on all ranks together, counted."""
    ranks = cluster(training, plan)
    as_read = lambda *at: {k: v.clone() for k, v in training.rows(*at).items()}  # noqa: E731
    for body in ranks.ranks.values():
        body.readers = replace(body.readers, batches=as_read)
    with LiveBytes(v for body in ranks.ranks.values() for v in body.variables.values()) as meter:
        ranks.run(steps)
    return meter.peak


def assert_evaluates_as_plain_torch(training: Training, layout: Layout) -> None:
    """Loss and accuracy of two batches, with weights that are trained."""
    weights = {**initial(training), **plain_loop(training, layout.clip_norm).after}
    plan = compiled_evaluation(training, layout).plan
    found = VirtualCluster(plan, training.rows, weights).run(2)
    expected = plain_evaluation(training, weights, 2)
    assert [set(step) for step in found] == [{"loss", "accuracy"}] * 2
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=LOSS_TOLERANCE)


def assert_as_plain_torch(training: Training, run: Run, clip_norm: float = 0.0) -> None:
    """Losses and weights of a run are those of a plain loop of as many steps."""
    plain = plain_loop(training, clip_norm, len(run.losses))
    assert loss_difference(run.losses, plain) <= LOSS_TOLERANCE
    weights = {name: run.weights[name] for name in plain.after}
    assert weight_difference(weights, plain) <= WEIGHT_TOLERANCE[training.optimizer.name]
