"""Values that are the same in every step decide, and sizes may depend on them; others do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture_evaluation, trace
from flowrun.engine.capture.check.compare import check_capture
from flowrun.engine.errors import RecipeError
from support.checks.watched import LOCK

BATCHES = [{"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(k))} for k in (0, 1)]


class Net(nn.Module):
    """A layer, a switch and a graph's edges as buffers, and a list of blocks with a hole."""

    on: Tensor
    edges: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.body, self.plain = nn.Linear(4, 4), body, torch.tensor([2.0, 0.0])
        self.blocks = nn.ModuleList([nn.Linear(4, 4), None, nn.Linear(4, 4)])  # type: ignore[list-item]
        self.register_buffer("on", torch.tensor([True]))
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 2], [0, 2, 1, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:  # Dynamo stops here
            return self.body(self, self.layer(x))


def switches(net: Any, h: Tensor) -> Tensor:
    return h * 2 if net.on else -h


def leaves_loops_out(net: Any, h: Tensor) -> Tensor:
    edges = net.edges[:, net.edges[0] != net.edges[1]]
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def selects(net: Any, h: Tensor) -> Tensor:
    return h[net.edges[0, :3] != 0][: int(net.edges.max())]


def walks_a_grid(net: Any, h: Tensor) -> Tensor:
    t = torch.linspace(0.0, 1.0, 4)
    steps = t[1:] - t[:-1]
    assert (steps > 0).all()
    for step in steps.tolist():
        h = h + step * h.tanh()
    return h


def counts_dims(net: Any, h: Tensor) -> Tensor:
    dims: list[int] = torch.arange(1, h.dim()).tolist()
    return h.sum(dim=dims)


def writes_what_is_known(net: Any, h: Tensor) -> Tensor:
    marks = torch.zeros(3)
    marks[1:].add_(net.plain)
    return h * 3 if marks.sum() > 1 else h


def pads_by_a_known_number(net: Any, h: Tensor) -> Tensor:
    return nn.functional.pad(h, (0, net.edges.max()))


def selects_none(net: Any, h: Tensor) -> Tensor:
    none = (net.edges > 5).nonzero()
    return h + len(none) + none[:, 1].sum()


def draws_beyond_a_bound(net: Any, h: Tensor) -> Tensor:
    h = h * 2 if torch.rand(1) > 0.0 else -h
    return h if torch.rand(()) < 0.0 or (torch.rand(3) >= 1).any() else -h


def takes_its_own_data(net: Any, h: Tensor) -> Tensor:
    net.layer.weight.data = net.layer.weight.data.to(h.dtype)
    return h if net.edges.grad is None else -h


TRAIN = (
    *(switches, leaves_loops_out, selects, walks_a_grid, counts_dims, writes_what_is_known),
    *(takes_its_own_data, draws_beyond_a_bound, pads_by_a_known_number),
    selects_none,
)


@pytest.mark.parametrize("body", TRAIN)
def test_what_is_the_same_in_every_step_may_be_asked_for(body: Any) -> None:
    task = Task(Net(body), {"x": "x"}, lambda output, _: output.pow(2).mean())
    with warnings.catch_warnings(action="ignore"):
        found = trace(task, BATCHES[0])
        values = {name: tensor.detach().clone() for name, tensor in task.tensors.items()}
        assert check_capture(task, BATCHES, found, values) == ""


@pytest.mark.parametrize(("body", "names"), [(switches, ["on"]), (selects, ["edges"])])
def test_a_buffer_that_decides_is_marked_though_no_op_reads_it(body: Any, names: Any) -> None:
    task = Task(Net(body), {"x": "x"}, lambda output, _: output.pow(2).mean())
    for graph in (trace(task, BATCHES[0]).graph, capture_evaluation(task, BATCHES[0])):
        assert [v.name for v in graph.variables if v.decides] == names


def turns_off(net: Any, h: Tensor) -> Tensor:
    h = h * 2 if net.on else -h
    net.on.logical_not_()
    return h


def turns_off_before(net: Any, h: Tensor) -> Tensor:
    net.on.logical_not_()
    return h * 2 if net.on.any() else -h


def assigns(net: Any, h: Tensor) -> Tensor:
    h = h * 2 if net.on else -h
    net.on = net.on.logical_not()
    return h


def marks_by_the_batch(net: Any, h: Tensor) -> Tensor:
    marks = torch.zeros(3)
    view = marks.view(3, 1)
    marks[0] = h.sum()
    return h * 2 if view.sum() > 0 else -h


def draws(net: Any, h: Tensor) -> Tensor:
    return h * 2 if torch.rand_like(net.plain).sum() > 1 else -h


def draws_within_a_bound(net: Any, h: Tensor) -> Tensor:
    return h * 2 if torch.rand(1) > 0.5 else -h


def stretches_draws(net: Any, h: Tensor) -> Tensor:
    return h * 2 if torch.rand(1).mul_(3) >= 1 else -h


def asks_a_weight(net: Any, h: Tensor) -> Tensor:
    return h * 2 if net.layer.weight.sum() > 0 else -h


def takes_other_data(net: Any, h: Tensor) -> Tensor:
    net.layer.weight.data = net.layer.weight.data * 2
    return h


WRITES = "asks for the value of"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((each, WRITES) for each in (turns_off, turns_off_before, assigns)),
        *((each, WRITES) for each in (marks_by_the_batch, draws, asks_a_weight)),
        *((each, WRITES) for each in (draws_within_a_bound, stretches_draws)),
        (takes_other_data, "replaces the .data"),
    ],
)
def test_what_may_change_is_refused(body: Any, words: str) -> None:
    task = Task(Net(body), {"x": "x"}, lambda output, _: output.pow(2).mean())
    with pytest.raises(RecipeError, match=words), warnings.catch_warnings(action="ignore"):
        trace(task, BATCHES[0])
