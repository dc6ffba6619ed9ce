from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ops.proof.simulated_ranks import run_ops

ROWS, SIZE = 100, 200


class Draws(nn.Module):
    """What a function of (ROWS, SIZE) ones draws, times a weight of 1."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight) * self.weight


def captured(function: Callable[[Tensor], Tensor]) -> LogicalGraph:
    result = Task(Draws(function), {"x": "x"}, lambda output, batch: output.mean())
    return capture(result, {"x": torch.ones(ROWS, SIZE)})


def evaluated(graph: LogicalGraph, draw: int = 0) -> dict[str, Tensor]:
    ops = tuple(
        replace(op, in_sbp=((),) * len(op.inputs), out_sbp=((),) * len(op.outputs))
        for op in graph.ops
    )
    values = {
        **{tensor: torch.ones(()) for tensor in graph.variable_of},
        "batch.x": torch.ones(ROWS, SIZE),
        "tangent": torch.ones(()),
        "@draw": torch.tensor(draw),
    }
    result = run_ops(ops, graph.tensors, values, ())
    return {name: result[tensor][()] for name, tensor in graph.results}


# the function, and the mean of what it makes
DRAWN: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "dropout": (lambda x: F.dropout(x, 0.25), 1.0),
    "dropout of whole channels": (
        lambda x: F.dropout2d(x.view(ROWS, 50, 2, 2), 0.25).view(ROWS, SIZE),
        1.0,
    ),
    "multinomial": (
        lambda x: x * torch.multinomial(torch.tensor([1.0, 3.0]), ROWS * SIZE, True).view(x.shape),
        0.75,
    ),
    "multinomial, each once": (lambda x: x[:, :1] * x[:, :4].exp().multinomial(2)[:, :1], 1.5),
    "rand_like": (torch.rand_like, 0.5),
    "rand": (lambda x: x * torch.rand(ROWS, 1), 0.5),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1, 5), 2.0),
    "randn": (lambda x: 3 + x * torch.randn(SIZE, 3).mean(1), 3.0),
    "randn_like": (lambda x: torch.randn_like(x).abs(), (2 / torch.pi) ** 0.5),
    "normal": (lambda x: torch.empty_like(x).normal_(2.0, 0.5), 2.0),
    "bernoulli of a tensor": (lambda x: torch.bernoulli(x.detach() * 0.3), 0.3),
    "bernoulli of a number": (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3),
    "exponential": (lambda x: torch.empty_like(x).exponential_(4.0), 0.25),
    "randint": (lambda x: x * torch.randint(2, 9, (ROWS, SIZE)), 5.0),
    "randint_like": (lambda x: torch.randint_like(x, 3, 6), 4.0),
    "randperm": (lambda x: x * torch.randperm(SIZE), (SIZE - 1) / 2),
    "gumbel": (lambda x: F.gumbel_softmax(x) * SIZE, 1.0),
}


@pytest.mark.parametrize(("function", "mean"), list(DRAWN.values()), ids=list(DRAWN))
def test_a_random_op_becomes_a_draw_with_the_same_mean(
    function: Callable[[Tensor], Tensor], mean: float
) -> None:
    graph = captured(function)
    targets = [op.target for op in graph.ops]
    assert any(target.startswith("flow.") for target in targets)
    assert not [t for t in targets if t.startswith("aten.") and _draws(t)]
    actual = evaluated(graph)
    assert float(actual["loss"]) == pytest.approx(mean, abs=0.05 * (1 + abs(mean)))
    other = evaluated(graph, draw=1)
    assert not torch.equal(actual["grad/weight"], other["grad/weight"]) or "perm" in str(targets)


def _draws(target: str) -> bool:
    packet, overload = target.split(".")[1:]
    tags = getattr(getattr(torch.ops.aten, packet), overload).tags
    return torch.Tag.nondeterministic_seeded in tags


def test_two_draws_of_one_graph_are_two_streams() -> None:
    graph = captured(lambda x: torch.rand_like(x) + torch.rand_like(x))
    streams = [op.args[2] for op in graph.ops if op.target == "flow.uniform"]
    assert len(set(streams)) == 2


def test_dropout_of_nothing_leaves_no_op() -> None:
    graph = captured(lambda x: F.dropout(x, 0.0).tanh())
    assert not [op.target for op in graph.ops if "drop" in op.target]
    assert "@draw" not in {feed.field for feed in graph.feeds}


def test_attention_without_dropout_draws_nothing() -> None:
    def attention(x: Tensor) -> Tensor:
        x = x.view(1, ROWS, 2, SIZE // 2)
        return F.scaled_dot_product_attention(x, x, x).view(ROWS, SIZE)

    assert "@draw" not in {feed.field for feed in captured(attention).feeds}


def test_a_random_op_that_is_not_known_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"random op aten.poisson.default in module") as error:
        captured(lambda x: x + torch.poisson(x.detach()))
    assert error.value.where == "model"
