"""What makes a plan another plan changes the digest; values of weights do not."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from flowrun.launcher.digest import Undigested, digest


class Net(nn.Module):
    """A module with a number, a constant tensor and a parameter."""

    def __init__(self, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale
        self.constant = torch.arange(3)
        self.register_buffer("steps", torch.zeros(2))


def tied() -> nn.Module:
    """Two layers that share a weight."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def with_constant(value: int) -> Net:
    """A net whose forward might read the numbers of a tensor that is no buffer."""
    net = Net()
    net.constant = torch.full((3,), value)
    return net


def frozen() -> Net:
    """A net with a weight that does not train."""
    net = Net()
    net.linear.weight.requires_grad_(False)
    return net


def add(x: int, y: int = 1) -> int:
    """A function."""
    return x + y


def test_values_of_weights_and_buffers_do_not_count() -> None:
    one, other = Net(), Net()
    other.get_buffer("steps").fill_(7)
    assert not torch.equal(one.linear.weight, other.linear.weight)
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Net(), Net(width=5)),
        (Net(), Net(scale=2.0)),
        (Net(), Net().double()),
        (Net(), Net().eval()),
        (Net(), frozen()),
        (with_constant(1), with_constant(2)),
        (tied(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
        (functools.partial(add, y=1), functools.partial(add, y=2)),
        (add, tied),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        ("1", 1),
        (1, True),
        (torch.float32, torch.float16),
        ({1, 2}, {1, 3}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_things_have_another_digest(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(copy.deepcopy(one))


def test_what_does_not_show_its_parts_is_refused() -> None:
    with pytest.raises(Undigested, match="lock"):
        digest([threading.Lock()])
