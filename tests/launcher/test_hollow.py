"""Planning takes no memory for weights, and makes the plan that weights with memory make."""

from __future__ import annotations

import torch
from torch import nn

from flowrun.launcher.hollow import hollow, on_meta
from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load

GPT = "recipe=gpt_tp model.depth=2 data.max_bytes=100000 engine.cache=false"


class Net(nn.Module):
    """One weight under two names, a buffer, and a number that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.rate = torch.linspace(0, 1, 3)[1].item()
        self.register_buffer("scale", torch.full((2,), 3.0))


def test_parameters_have_shapes_and_no_memory_and_the_rest_is_as_ever() -> None:
    with on_meta():
        net = Net()
    hollow(net)
    assert {p.untyped_storage().nbytes() for p in net.parameters()} == {0}
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    assert net.first.weight is net.second.weight
    assert isinstance(net.first.weight, nn.Parameter)
    assert net.first.weight.shape == (8, 8)
    assert net.rate == 0.5
    assert net.get_buffer("scale").tolist() == [3.0, 3.0]
    assert Net().first.weight.untyped_storage().nbytes() == 256  # nothing is left behind


def test_a_plan_made_without_values_is_the_plan() -> None:
    made = [Job(load(GPT.split()), values=values).training for values in (True, False)]
    assert str(made[0].plan) == str(made[1].plan)
    assert made[0].rehearsal == made[1].rehearsal


def test_initial_values_do_not_depend_on_the_layout() -> None:
    layouts = ("placement.axes.tensor=1", "placement.axes.tensor=2", "placement.stages=2")
    first, *others = (Job(load([*GPT.split(), layout])).initial for layout in layouts)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
