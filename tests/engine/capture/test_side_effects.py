import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture, trace
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph

Change = Callable[[Any, Tensor], Any]


@dataclasses.dataclass
class Counts:
    n: int = 0


class Net(nn.Module):
    """A layer beside every kind of Python state."""

    calls = 0
    running: Tensor

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"fc": nn.Linear(4, 4)})
        self.steps, self.table, self.line, self.seen = 0, {"n": 0}, [0], {0}
        self.counts, self.numbers, self.mask = Counts(), itertools.count(), None
        self.register_buffer("running", torch.zeros(4))
        self.change = change
        around = 0

        def counted() -> int:
            nonlocal around
            around += 1
            return around

        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.inner["fc"](x).mean() + self.running.sum()


COUNT, TABLE = 0, {"n": 0}


def a_global(net: Any, x: Tensor) -> None:
    global COUNT
    COUNT += 1


def attribute(net: Any, x: Tensor) -> None:
    net.steps += 1


KINDS: dict[str, Change] = {
    "`steps` of the model": attribute,
    "`hits` of module inner.fc": lambda net, x: setattr(net.inner["fc"], "hits", 1),
    "`table` of the model": lambda net, x: net.table.update(n=net.table["n"] + 1),
    "`line` of the model": lambda net, x: net.line.append(1),
    "`seen` of the model": lambda net, x: net.seen.add(len(net.seen)),
    "`counts.n` of the model": lambda net, x: setattr(net.counts, "n", net.counts.n + 1),
    "`numbers` of the model": lambda net, x: next(net.numbers),
    "a variable that counted closes over": lambda net, x: net.counted(),
    "the global `Net.calls`": lambda net, x: setattr(Net, "calls", Net.calls + 1),
    "the global `COUNT`": a_global,
    "the global `TABLE`": lambda net, x: TABLE.update(n=TABLE["n"] + 1),
    "`mask` of the model": lambda net, x: setattr(net, "mask", x.detach()),
    "`training` of module inner.fc": lambda net, x: net.inner["fc"].eval(),
}


def graph_of(change: Change, net: Net | None = None) -> LogicalGraph:
    return capture(Task(net or Net(change), {"x": "x"}), {"x": torch.ones(3, 4)})


def effects_of(change: Change) -> Any:
    return trace(Task(Net(change), {"x": "x"}), {"x": torch.ones(3, 4)}).effects


@pytest.mark.parametrize(("named", "change"), KINDS.items(), ids=KINDS)
def test_what_forward_changes_in_python_is_named(named: str, change: Change) -> None:
    (effect,) = effects_of(change)
    assert effect.describe(*effect.attributes) == named


def test_an_effect_knows_the_users_line() -> None:
    (effect,) = effects_of(attribute)
    assert effect.place.startswith("tests/engine/capture/test_side_effects.py:")
    assert effect.place.endswith("in attribute: net.steps += 1")


def test_what_forward_puts_back_or_only_reads_is_not_an_effect() -> None:
    assert effects_of(lambda net, x: net.steps) == ()


def test_a_graph_does_not_depend_on_the_effects() -> None:
    assert str(graph_of(attribute)) == str(graph_of(lambda net, x: None))


# ---- buffers that forward assigns ----------------------------------------------------------------


ASSIGNS: dict[str, Change] = {
    "an attribute": lambda net, x: setattr(net, "running", 0.9 * net.running + 0.1 * x.mean(0)),
    "the dict": lambda net, x: net._buffers.update(running=net.running + 1),
    "registered again": lambda net, x: net.register_buffer("running", net.running + 1),
}


@pytest.mark.parametrize("change", ASSIGNS.values(), ids=ASSIGNS)
def test_a_buffer_that_forward_assigns_is_an_assign(change: Change) -> None:
    graph = graph_of(change)
    (buffer,) = (v for v in graph.variables if v.name == "running")
    assert graph.producer[buffer.new or ""].target == "flow.assign"
    assert effects_of(change) == ()


def test_a_buffer_that_forward_assigns_and_never_reads_is_an_assign() -> None:
    net = Net(lambda net, x: setattr(net.inner["fc"], "last", x[0]))
    net.inner["fc"].register_buffer("last", torch.zeros(4))
    graph = graph_of(net.change, net)
    (buffer,) = (v for v in graph.variables if v.name == "inner.fc.last")
    assert graph.producer[buffer.new or ""].target == "flow.assign"


@pytest.mark.parametrize("value", [torch.ones(5), torch.ones(4, dtype=torch.long)])
def test_a_buffer_that_changes_its_shape_or_dtype_is_refused_by_name(value: Tensor) -> None:
    def grows(net: Any, x: Tensor) -> None:
        net.running = torch.cat([value, value[:0]])

    with pytest.raises(RecipeError, match=r"to the buffer running, which is torch\.float32"):
        graph_of(grows)


@pytest.mark.parametrize("persistent", [True, False])
def test_an_nn_buffer_that_forward_adds_to_is_an_assign(persistent: bool) -> None:
    def added(net: Any, x: Tensor) -> None:
        net.running += x.mean(0)

    net = Net(added)
    del net.running
    net.running = nn.Buffer(torch.zeros(4), persistent=persistent)
    (buffer,) = (v for v in graph_of(added, net).variables if v.name == "running")
    assert buffer.new
    assert isinstance(net.running, nn.Buffer)
