import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture, trace
from flowrun.engine.errors import RecipeError

COUNT = 0
TABLE = {"n": 0}


@dataclasses.dataclass
class Counts:
    n: int = 0


class Net(nn.Module):
    """A layer beside every kind of Python state."""

    calls = 0
    running: Tensor

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
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
        out: Tensor = self.inner["fc"](x).mean() + self.running.sum()
        return out


def attribute(net: Any, x: Tensor) -> None:
    net.steps += 1


def of_another_module(net: Any, x: Tensor) -> None:
    net.inner["fc"].hits = getattr(net.inner["fc"], "hits", 0) + 1


def table(net: Any, x: Tensor) -> None:
    net.table["n"] += 1


def line(net: Any, x: Tensor) -> None:
    net.line.append(1)


def seen(net: Any, x: Tensor) -> None:
    net.seen.add(len(net.seen))


def dataclass_object(net: Any, x: Tensor) -> None:
    net.counts.n += 1


def iterator(net: Any, x: Tensor) -> None:
    next(net.numbers)


def closure(net: Any, x: Tensor) -> None:
    net.counted()


def class_attribute(net: Any, x: Tensor) -> None:
    Net.calls += 1


def a_global(net: Any, x: Tensor) -> None:
    global COUNT
    COUNT += 1


def a_global_table(net: Any, x: Tensor) -> None:
    TABLE["n"] += 1


def a_tensor(net: Any, x: Tensor) -> None:
    net.mask = x.detach()


def mode(net: Any, x: Tensor) -> None:
    net.inner["fc"].eval()


KINDS: dict[Callable[[Any, Tensor], None], str] = {
    attribute: "`steps` of the model",
    of_another_module: "`hits` of module inner.fc",
    table: "`table` of the model",
    line: "`line` of the model",
    seen: "`seen` of the model",
    dataclass_object: "`counts.n` of the model",
    iterator: "`numbers` of the model",
    closure: "a variable that counted closes over",
    class_attribute: "the global `Net.calls`",
    a_global: "the global `COUNT`",
    a_global_table: "the global `TABLE`",
    a_tensor: "`mask` of the model",
    mode: "`training` of module inner.fc",
}


def captured(change: Callable[[Any, Tensor], Any]) -> Any:
    """The effects of a change that forward makes, and the graph."""
    return trace(Task(Net(change), {"x": "x"}), {"x": torch.ones(3, 4)})


@pytest.mark.parametrize("change", KINDS, ids=lambda change: str(change.__name__))
def test_what_forward_changes_in_python_is_named(change: Callable[[Any, Tensor], None]) -> None:
    (effect,) = captured(change).effects
    assert effect.describe(*effect.attributes) == KINDS[change]


def test_an_effect_knows_the_users_line() -> None:
    (effect,) = captured(table).effects
    assert effect.place.startswith("tests/engine/capture/test_side_effects.py:")
    assert effect.place.endswith('in table: net.table["n"] += 1')


def test_what_forward_puts_back_or_only_reads_is_not_an_effect() -> None:
    assert captured(lambda net, x: net.steps).effects == ()


def test_a_graph_does_not_depend_on_the_effects() -> None:
    plain = capture(Task(Net(lambda net, x: None), {"x": "x"}), {"x": torch.ones(3, 4)})
    assert str(rewritten_of(attribute)) == str(plain)


def rewritten_of(change: Callable[[Any, Tensor], None]) -> Any:
    """The graph of a net that makes a change."""
    return capture(Task(Net(change), {"x": "x"}), {"x": torch.ones(3, 4)})


# ---- buffers that forward assigns ----------------------------------------------------------------


def statistics(net: Any, x: Tensor) -> None:
    net.running = 0.9 * net.running + 0.1 * x.mean(0)


def only_written(net: Any, x: Tensor) -> None:
    net.inner["fc"].last = x[0]


def through_the_dict(net: Any, x: Tensor) -> None:
    net._buffers["running"] = net.running + 1


def registered_again(net: Any, x: Tensor) -> None:
    net.register_buffer("running", net.running + 1)


@pytest.mark.parametrize("change", [statistics, through_the_dict, registered_again])
def test_a_buffer_that_forward_assigns_is_an_assign(change: Callable[[Any, Tensor], None]) -> None:
    graph = rewritten_of(change)
    (buffer,) = (v for v in graph.variables if v.name == "running")
    assert graph.producer[buffer.new].target == "flow.assign"
    assert captured(change).effects == ()


def test_a_buffer_that_forward_assigns_and_never_reads_is_an_assign() -> None:
    net = Net(only_written)
    net.inner["fc"].register_buffer("last", torch.zeros(4))
    graph = capture(Task(net, {"x": "x"}), {"x": torch.ones(3, 4)})
    (buffer,) = (v for v in graph.variables if v.name == "inner.fc.last")
    assert graph.producer[buffer.new or ""].target == "flow.assign"


@pytest.mark.parametrize("value", [torch.ones(5), torch.ones(4, dtype=torch.long)])
def test_a_buffer_that_changes_its_shape_or_dtype_is_refused_by_name(value: Tensor) -> None:
    def grows(net: Any, x: Tensor) -> None:
        net.running = torch.cat([value, value[:0]])

    with pytest.raises(RecipeError, match=r"to the buffer running, which is torch\.float32"):
        rewritten_of(grows)


@pytest.mark.parametrize("persistent", [True, False])
def test_an_nn_buffer_that_forward_adds_to_is_an_assign(persistent: bool) -> None:
    def added(net: Any, x: Tensor) -> None:
        net.running += x.mean(0)

    net = Net(added)
    del net.running
    net.running = nn.Buffer(torch.zeros(4), persistent=persistent)
    graph = capture(Task(net, {"x": "x"}), {"x": torch.ones(3, 4)})
    (buffer,) = (v for v in graph.variables if v.name == "running")
    assert buffer.new
    assert isinstance(net.running, nn.Buffer)
