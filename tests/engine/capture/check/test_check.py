import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowrun.engine.capture.capture import Task, Traced, trace
from flowrun.engine.capture.check import compare as check
from flowrun.engine.capture.check.compare import check_capture
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph, Op

Forward = Callable[[Any, Tensor], Tensor]
BATCHES = [
    {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(k)), "y": torch.arange(6) % 4}
    for k in range(2)
]


class Net(nn.Module):
    """Two layers, a norm, a buffer and Python state of many kinds."""

    average: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.h, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("average", torch.zeros(8))
        self.steps, self.ready, self.table, self.queue = 0, False, {"n": 0}, deque(maxlen=2)
        self.mask: Tensor | None = None
        self.last, self.count = torch.zeros(8), torch.zeros(())
        self.made = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self, x)


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(output, batch["y"])


Prepare = Callable[[Any], None]


def with_teacher(net: Any) -> None:
    net.slow = nn.Linear(8, 8).requires_grad_(False)


def checked(forward: Forward, prepare: Prepare = with_teacher) -> str:
    return compared(*traced(forward, prepare))


def traced(forward: Forward, prepare: Prepare = with_teacher) -> tuple[Task, Traced]:
    """A net, and what was captured of it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(forward)
    prepare(net)
    task = Task(net, {"x": "x"}, cross_entropy)
    return task, trace(task, BATCHES[0])


def compared(task: Task, found: Traced) -> str:
    values = {name: tensor.detach().clone() for name, tensor in task.tensors.items()}
    return check_capture(task, BATCHES, found, values)


# ---- what is right -------------------------------------------------------------------------------


def plain(net: Any, x: Tensor) -> Tensor:
    return net.h(torch.relu(net.a(x)))


def norm(net: Any, x: Tensor) -> Tensor:
    return net.h(net.norm(net.a(x)))  # the gradient of a.bias cancels out


def dropout(net: Any, x: Tensor) -> Tensor:
    return net.h(net.drop(net.a(x).t()).t())


def draws(net: Any, x: Tensor) -> Tensor:
    noise = torch.randn_like(x) + torch.rand(8) + torch.bernoulli(torch.full((8,), 0.4))
    noise = noise + torch.multinomial(torch.ones(8), 8)
    noise = noise + torch.randint(0, 3, (8,)) + torch.empty(8).exponential_()
    return net.h(functional.alpha_dropout(net.a(x) + noise, 0.2, training=True))


def attention(net: Any, x: Tensor) -> Tensor:
    y = net.a(x).view(1, -1, 2, 4).transpose(1, 2)
    y = functional.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
    return net.h(y.transpose(1, 2).reshape(x.shape))


def checkpointed(net: Any, x: Tensor) -> Tensor:
    y = checkpoint(lambda z: net.drop(torch.relu(net.a(z))), x, use_reentrant=False)
    return net.h(y)


def writes_what_nobody_reads(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.seen, net.last = y.detach(), y.mean()
    return net.h(y) + net.last


def lazy_mask(net: Any, x: Tensor) -> Tensor:
    if net.mask is None or len(net.mask) != len(x):
        net.mask = 2 * torch.ones(len(x), 1)
    return net.h(net.a(x)) * net.mask


def lazy_flag(net: Any, x: Tensor) -> Tensor:
    if not net.ready:
        net.ready = True
    net.table[tuple(x.shape)] = 1
    return plain(net, x)


def assigns(net: Any, x: Tensor) -> Tensor:
    net.average = 0.9 * net.average + 0.1 * x.mean(0)
    return plain(net, x + net.average)


def infinite(net: Any, x: Tensor) -> Tensor:
    net.average = x.mean(0).masked_fill(x.mean(0) > 0, math.inf)
    return plain(net, x)


def teacher(net: Any, x: Tensor) -> Tensor:
    """A frozen copy that follows the weights, as in MoCo and BYOL."""
    with torch.no_grad():
        for theirs, own in zip(net.slow.parameters(), net.a.parameters(), strict=True):
            theirs.lerp_(own, 0.1)
    return net.h(net.a(x) - net.slow(x))


def another_mode_for_a_while(net: Any, x: Tensor) -> Tensor:
    net.norm.eval()
    y = net.norm(net.a(x))
    net.norm.train()
    return net.h(y)


RIGHT = (
    *(plain, norm, dropout, draws, attention, checkpointed, writes_what_nobody_reads, lazy_mask),
    *(lazy_flag, assigns, infinite, teacher, another_mode_for_a_while),
)


@pytest.mark.parametrize("forward", RIGHT, ids=lambda forward: str(forward.__name__))
def test_a_module_that_is_captured_right_passes(forward: Forward) -> None:
    assert checked(forward) == ""


# ---- what is refused -----------------------------------------------------------------------------


def counter(net: Any, x: Tensor) -> Tensor:
    net.steps += 1
    return plain(net, x) * (2 if net.steps > 1000 else 1)


def table(net: Any, x: Tensor) -> Tensor:
    net.table["n"] += 1
    return plain(net, x)


def queue(net: Any, x: Tensor) -> Tensor:
    net.queue.append(len(net.queue))
    return plain(net, x)


def counter_of_a_tensor(net: Any, x: Tensor) -> Tensor:
    net.count = net.count + 1
    return plain(net, x) * torch.where(net.count > 1000, 2.0, 1.0)


def stays_in_eval(net: Any, x: Tensor) -> Tensor:
    out = net.h(net.drop(net.a(x)))
    net.drop.eval()
    return out


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (counter, "`steps` of the model"),
        (table, "`table` of the model"),
        (queue, "`queue` of the model"),
        (counter_of_a_tensor, "`count` of the model"),
    ],
)
def test_python_state_that_changes_with_every_call_is_refused_by_name(
    forward: Forward, named: str
) -> None:
    with pytest.raises(RecipeError, match=f"forward changes {named}") as error:
        checked(forward)
    assert f"test_check.py:{forward.__code__.co_firstlineno + 1} in" in error.value.problem
    assert "torch.where" in error.value.instead


def memory(net: Any, x: Tensor) -> Tensor:
    y = net.a(x) + (0.0 if net.mask is None else net.mask)
    net.mask = y.detach().mean(0)
    return net.h(y)


def made_of_weights_once(net: Any, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = 2 * net.a.weight.detach()
    return net.h(functional.linear(x, net.mask) + net.a(x))


def first_call_alone(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    if not net.ready:
        net.average, net.ready = y.detach().mean(0), True
    return net.h(y - net.average)


def zeroes_gradients(net: Any, x: Tensor) -> Tensor:
    net.zero_grad()
    return plain(net, x)


def drops_a_gradient(net: Any, x: Tensor) -> Tensor:
    net.h.weight.grad = None
    return plain(net, x)


def keeps_a_graph(net: Any, x: Tensor) -> Tensor:
    """torch 2.12 refuses the tensor itself, as it is not a buffer."""
    y = net.a(x) + net.last
    net.last = torch.tanh(y).mean(0)
    return net.h(y)


def with_hook(net: Any) -> None:
    calls = [0]

    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient * calls[0]

    net.a.weight.register_hook(hook)


EARLIER = r"the gradient of (a|h)\.weight(.|\n)*earlier micro-batches"
REFUSED: dict[str, tuple[Forward, str]] = {
    "a mode": (stays_in_eval, r"`training` of module drop .* runs in another mode"),
    "what a call leaves": (memory, "Forward writes to `mask` of the model"),
    "what the first made": (made_of_weights_once, "Forward writes to `mask` of the model"),
    "a flag": (first_call_alone, "Forward writes to `ready` of the model"),
    "gradients set to zero": (zeroes_gradients, EARLIER),
    "a gradient that is dropped": (drops_a_gradient, EARLIER),
    "a graph that is kept": (keeps_a_graph, "the graph a second time|to FakeTensors first"),
    "a hook": (plain, r"the hook on the gradient of a.weight \(test_check.py"),
}


@pytest.mark.parametrize(("forward", "said"), REFUSED.values(), ids=REFUSED)
def test_what_one_call_leaves_for_another_is_refused_by_name(forward: Forward, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        checked(forward, with_hook if forward is plain else with_teacher)


def registers(net: Any, x: Tensor, persistent: bool = True) -> Tensor:
    if not hasattr(net, "late"):
        net.register_buffer("late", torch.full((4,), 2.0), persistent)
    return net.h(net.a(x)) * net.late


def test_a_buffer_that_forward_registers_is_refused_by_name_unless_nothing_saves_it() -> None:
    with pytest.raises(RecipeError, match="forward registers late in its first call"):
        checked(registers)
    assert not checked(lambda net, x: registers(net, x, persistent=False))


# ---- planted faults ------------------------------------------------------------------------------

Fault = Callable[[LogicalGraph], LogicalGraph]


def with_op(target: str, change: Callable[[Op], Op]) -> Fault:
    def fault(graph: LogicalGraph) -> LogicalGraph:
        at = next(k for k, op in enumerate(graph.ops) if op.target == target)
        ops = list(graph.ops)
        ops[at] = change(ops[at])
        return replace(graph, ops=tuple(ops))

    return fault


def without_result(key: str) -> Fault:
    return lambda graph: replace(
        graph, results=tuple((k, name) for k, name in graph.results if k != key)
    )


def swapped(one: str, other: str) -> Fault:

    def fault(graph: LogicalGraph) -> LogicalGraph:
        names = dict(graph.results)
        names[one], names[other] = names[other], names[one]
        return replace(graph, results=tuple(names.items()))

    return fault


SIGMOID = with_op("aten.relu.default", lambda op: replace(op, target="aten.sigmoid.default"))
FACTOR = with_op("aten.mul.Tensor", lambda op: replace(op, args=(op.args[0], 0.8)))
DROPOUT = with_op(
    "aten.native_dropout.default", lambda op: replace(op, args=(op.args[0], 0.2, True))
)
FILLS = {
    f"{value} in the place of infinity": (
        with_op("aten.masked_fill.Scalar", lambda op, v=value: replace(op, args=(*op.args[:2], v))),
        infinite,
    )
    for value in (-math.inf, math.nan, 0.0)
}
FAULTS = {
    **FILLS,
    "another op": (SIGMOID, plain),
    "another factor": (FACTOR, assigns),
    "a lost write": (without_result("writes/average"), assigns),
    "a lost statistic": (without_result("writes/norm.running_var"), norm),
    "a lost gradient": (without_result("grad/a.weight"), plain),
    "exchanged gradients": (swapped("grad/norm.weight", "grad/norm.bias"), norm),
    "another dropout": (DROPOUT, dropout),
    "a lost write into a frozen parameter": (without_result("writes/slow.bias"), teacher),
}


@pytest.mark.parametrize(("fault", "forward"), list(FAULTS.values()), ids=list(FAULTS))
def test_a_fault_of_the_captured_graph_is_found(fault: Fault, forward: Forward) -> None:
    task, trace = traced(forward)
    with pytest.raises(RecipeError, match="does not compute what the model computes"):
        compared(task, replace(trace, graph=fault(trace.graph)))


# ---- what is too large ---------------------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compared on it."""
    monkeypatch.setattr(check, "MAX_FLOPS", 0.0)


@pytest.mark.usefixtures("small_machine")
def test_a_large_model_is_not_compared_and_says_so() -> None:
    assert "a micro-batch takes" in checked(plain)
    assert "a micro-batch takes" in checked(lazy_mask)


@pytest.mark.usefixtures("small_machine")
def test_python_state_of_a_large_model_is_looked_at_without_values() -> None:
    with pytest.raises(RecipeError, match="`steps` of the model"):
        checked(counter)


def test_what_plain_torch_cannot_do_either_is_left_to_the_step() -> None:
    def out_of_range(output: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(output, batch["y"] + 4)

    task, _ = traced(plain)
    task = replace(task, loss=functools.partial(out_of_range))
    assert "Target 4 is out of bounds" in compared(task, trace(task, BATCHES[0]))


# ---- what plain torch cannot do ------------------------------------------------------------------


def narrow_distances(net: Any, x: Tensor) -> Tensor:
    return net(x) + torch.cdist(x.bfloat16(), x.bfloat16()).mean()  # torch has no kernel of it


def test_what_no_call_can_do_is_refused_with_torchs_words_and_the_users_line() -> None:
    task, trace = traced(lambda net, x: narrow_distances(net.a, x))
    values = {name: tensor.detach().clone() for name, tensor in task.tensors.items()}
    with pytest.raises(RecipeError, match="fails in plain torch, too") as error:
        check_capture(task, BATCHES, trace, values)
    assert "not implemented for 'BFloat16'" in error.value.problem
    assert "test_check.py:" in error.value.problem


def test_what_the_loss_cannot_do_is_refused_at_its_key() -> None:
    def compare_with_bools(output: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(output, batch["y"] > 1)  # torch captures it nevertheless

    task, _ = traced(plain)
    task = replace(task, loss=compare_with_bools)
    with pytest.raises(RecipeError, match="the loss fails in plain torch, too") as error:
        compared(task, trace(task, BATCHES[0]))
    assert error.value.where == "task.loss"
    assert "test_check.py:" in error.value.problem


def test_what_another_device_may_do_is_reported_alone() -> None:
    task, trace = traced(lambda net, x: narrow_distances(net.a, x))
    values = {name: tensor.detach().clone() for name, tensor in task.tensors.items()}
    why = check_capture(task, BATCHES, trace, values, on_cpu=False)
    assert why.startswith("plain torch fails in a call of the model: NotImplementedError")
