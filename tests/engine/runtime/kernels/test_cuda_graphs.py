"""Regions that are recorded and played train as those that run op after op, bit for bit.

What records is a stand-in for CUDA's, which test_cuda.py has where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.actors.plan import Plan
from flowrun.engine.runtime.kernels import cuda_graphs as graphs
from flowrun.engine.runtime.kernels.cuda_graphs import (
    WARM_STEPS,
    LastingMemory,
    RecordedKernel,
    record_kernels,
)
from flowrun.engine.runtime.kernels.kernels import Kernel, eager_kernels
from flowrun.engine.strategy import Recompute
from support.graph_on_cpu import OnCpu
from support.layouts import LAYOUTS, Layout, compiled, run_plan
from support.plain_loop import TINY_CONVNET, TINY_GPT, TINY_MLP, Training

STEPS = WARM_STEPS + 6


class Kept:
    """Kernels that are played, and kept to be asked afterwards."""

    def __init__(self) -> None:
        self.played: list[RecordedKernel] = []

    def __call__(
        self, plan: Plan, stage: int, coordinate: tuple[int, ...], device: torch.device
    ) -> Mapping[int, Kernel]:
        made = record_kernels(eager_kernels, OnCpu)(plan, stage, coordinate, device)
        self.played += [kernel for kernel in made.values() if isinstance(kernel, RecordedKernel)]
        return made


def check(training: Training, layout: Layout, order_seed: int | None = None) -> Kept:
    plan, kernels = compiled(training, layout).plan, Kept()
    plain = run_plan(training, plan, STEPS, order_seed)
    found = run_plan(training, plan, STEPS, order_seed, kernels)
    assert found.losses == plain.losses
    for name, value in plain.weights.items():
        assert torch.equal(found.weights[name], value), name
    return kernels


@pytest.mark.parametrize("layout", LAYOUTS[5:20:6], ids=str)
def test_played_regions_train_as_others(layout: Layout) -> None:
    kernels = check(TINY_GPT, layout)
    assert all(kernel.plays for kernel in kernels.played)


@pytest.mark.parametrize("training", [TINY_MLP, TINY_CONVNET], ids=["mlp", "convnet"])
def test_of_other_models_too(training: Training) -> None:
    check(training, Layout(stages=2))


@pytest.mark.parametrize("order_seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_in_any_order_of_messages(order_seed: int) -> None:
    check(TINY_GPT, Layout(stages=2, tensor=2, register_slots=3), order_seed)


def test_recomputation_and_narrow_numbers_are_played() -> None:
    check(TINY_GPT, Layout(stages=2, recompute=Recompute(("blocks.*",))))
    check(replace(TINY_GPT, autocast=torch.bfloat16), Layout())


# ---- one region ----------------------------------------------------------------------------------


def doubled(values: list[Tensor]) -> tuple[Tensor, ...]:
    return (values.pop() * 2,)


def region(kernel: Kernel, moving: tuple[int, ...] = (0,), warm: int = 0) -> RecordedKernel:
    return RecordedKernel(kernel, moving, warm, LastingMemory(OnCpu()))


def lasting(played: RecordedKernel, value: Tensor) -> Tensor:
    """The same where nothing moves."""
    return played.memory.allocate(value).copy_(value)


def recordings(played: RecordedKernel) -> int:
    return sum(map(len, played.recordings.values()))


def test_an_input_may_lie_anywhere() -> None:
    played = region(doubled, warm=1)
    counts = []
    for k in range(4):
        (made,) = played([torch.full((3,), float(k))])
        assert made.tolist() == [2 * k] * 3
        del made
        counts.append((recordings(played), played.plays))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_what_stays_is_read_where_it_is() -> None:
    played = region(doubled)
    places = [lasting(played, torch.ones(3)), lasting(played, torch.full((3,), 5.0))]
    for _ in range(3):
        for x in places:
            assert torch.equal(played([x])[0], 2 * x)
    assert (len(played.recordings), len(played.memory.lent), len(played.slots)) == (2, 0, 1)


def test_what_is_still_held_is_not_written_again() -> None:
    played, x = region(doubled), torch.ones(3)
    held = []
    for k in range(6):
        x.fill_(k)
        (made,) = played([x])
        held.append(made if k % 2 else made[1:])  # a view counts
        held = held[-2:]
    assert [h.tolist() for h in held] == [[8, 8], [10, 10, 10]]
    assert recordings(played) == 3  # two that are held, one that is made


def test_variables_are_looked_for_nowhere() -> None:
    def step(values: list[Tensor]) -> tuple[Tensor, ...]:
        weight, x = values
        return (weight.add_(x), x * weight)

    played, weight, x = region(step, moving=(1,)), torch.zeros(2), torch.ones(2)
    for k in range(1, 5):
        new, product = played([weight, x])
        assert new is weight
        assert weight.tolist() == product.tolist() == [k, k]
        del product
    assert recordings(played) == 1


@pytest.mark.parametrize("stays", [False, True])
def test_views_of_inputs_are_of_those_of_the_act(stays: bool) -> None:
    def halves(values: list[Tensor]) -> tuple[Tensor, ...]:
        (x,) = values
        return x[2:], x.view(2, 2).t(), x[:2] + 1

    played, whole = region(halves), torch.arange(5.0)
    whole = lasting(played, whole) if stays else whole
    for k in range(4):
        whole += 1
        last, turned, first = played([whole[1:]])
        assert (last.data_ptr() == whole[3:].data_ptr()) == stays
        assert last.tolist() == [4 + k, 5 + k]
        assert turned.tolist() == [[2 + k, 4 + k], [3 + k, 5 + k]]
        assert first.tolist() == [3 + k, 4 + k]
        del last, turned, first
    assert recordings(played) == 1


@pytest.mark.parametrize("begins", [None, torch.zeros(2)], ids=["nothing", "elsewhere"])
def test_a_sum_grows_in_the_memory_of_its_first_addend(begins: Tensor | None) -> None:
    def added(values: list[Tensor]) -> tuple[Tensor, ...]:
        x, total = values
        return (x * 1 if total is None else total.add_(x),)

    played, x = region(added, moving=(0, 1)), torch.ones(2)
    for step in range(5):
        total: Any = begins
        places = set()
        for _ in range(3):
            (total,) = played([x, total])
            places.add(total.data_ptr())
        assert total.tolist() == [3, 3] and len(places) == 1, step
    assert recordings(played) == 2 and played.plays == 15


def test_recordings_of_other_places_fill_the_same_slot() -> None:
    played = region(doubled)
    places = [lasting(played, torch.full((3,), float(k))) for k in range(4)]
    for _ in range(3):
        assert [played([x])[0].tolist() for x in places] == [[2 * k] * 3 for k in range(4)]
    assert (recordings(played), len(played.slots)) == (4, 1)


def test_beyond_so_many_places_inputs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_ADDRESS_SETS", 2)
    played = region(doubled)
    places = [lasting(played, torch.full((3,), float(k))) for k in range(5)]
    for _ in range(3):
        for x in places:
            assert torch.equal(played([x])[0], 2 * x)
    assert (recordings(played), len(played.memory.lent)) == (3, 1)


def test_elements_that_are_shown_twice_are_copied_once() -> None:
    def kept(values: list[Tensor]) -> tuple[Tensor, ...]:
        (x,) = values
        return x * 2, (x[0] + 1).expand(4, 3)

    played, x = region(kept), torch.arange(3.0)
    for k in range(3):
        x += 1
        twice, shown = played([x.expand(2, 3)])
        assert twice.tolist() == [[2 + 2 * k, 4 + 2 * k, 6 + 2 * k]] * 2
        assert shown.stride() == (0, 1) and shown.tolist() == [[2 + k, 3 + k, 4 + k]] * 4
    ((lent,),) = played.memory.lent.values()
    assert lent.untyped_storage().nbytes() == 12


def test_regions_share_what_their_inputs_are_copied_to() -> None:
    def added(values: list[Tensor]) -> tuple[Tensor, ...]:
        one, other = values
        return (one + other, one - other)

    first = region(added, moving=(0, 1))
    second = RecordedKernel(added, (0, 1), 0, first.memory)
    for k in range(3):
        held = first([torch.full((2,), float(k)), torch.ones(2)])
        total, difference = second([torch.full((2,), 9.0), torch.full((2,), float(k))])
        assert [x.tolist() for x in held] == [[k + 1] * 2, [k - 1] * 2]
        assert (total.tolist(), difference.tolist()) == ([9 + k] * 2, [9 - k] * 2)
    assert [len(lent) for lent in first.memory.lent.values()] == [2]


@pytest.mark.parametrize("stays", [False, True])
def test_inputs_of_two_dtypes_may_lie_in_one_message(stays: bool) -> None:
    def views(values: list[Tensor]) -> tuple[Tensor, ...]:
        wide, narrow = values
        return wide.view(2, 2), narrow[1:], wide, wide.add_(1)[2:]

    played, message = region(views, moving=(0, 1)), torch.zeros(24, dtype=torch.uint8)
    message = lasting(played, message) if stays else message
    wide, narrow = message[:16].view(torch.float32), message[16:].view(torch.bfloat16)
    for k in range(4):
        wide.copy_(torch.arange(4.0) + k)
        narrow.fill_(k)
        square, rest, same, last = played([wide, narrow])
        assert square.tolist() == [[k + 1, k + 2], [k + 3, k + 4]]
        assert (rest.dtype, rest.tolist()) == (torch.bfloat16, [k] * 3)
        assert (same is wide) == stays and same.tolist() == [k + 1, k + 2, k + 3, k + 4]
        assert last.tolist() == [k + 3, k + 4]


def test_what_cannot_be_recorded_is_named() -> None:
    def waits(values: list[Tensor]) -> tuple[Tensor, ...]:
        if recording:
            raise ValueError("operation not permitted when stream is capturing")
        return (values.pop() + 1,)

    played, x, recording = region(waits, warm=1), torch.ones(1), False
    played([x])
    recording = True
    with pytest.raises(RuntimeError, match=r"not permitted .*\n.*engine\.cuda_graphs=false"):
        played([x])
