"""Names of a model's own never meet those of ops and passes, whatever they are."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.names import tensor_of_field, tensor_of_node, tensor_of_variable
from flowrun.engine.ops import registry
from support.layouts.grids import Layout, compiled, example, task
from support.nets.odd_models import (
    CLASSES,
    DATA,
    STAGES,
    TENSOR,
    WIDTH,
    ZERO,
    assert_trains_alike,
    trains_of,
)

# every op with a table, as torch calls its nodes, and words of passes, states and readers
OPS = sorted({target.split(".")[1] for target in registry.OPS if target.startswith("aten.")})
WORDS = """
    tangent step batch loss lr grad skip update draw seed weights loss_scale clip_scale exp_avg
    momentum_buffer ema before sum model
"""
SIGNS = """
    grad/a exp_avg/a exp_avg/mean mean' mean/before mean:S(0) mean@1 @step @step@0 mm/again mean~
    ~mean %mean x/pinned writes/mean a-b ä
"""


def _named(*names: str) -> type[nn.Module]:
    """A parameter, a buffer that forward changes and a module of each name, and ops beside them."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.inner, self.scales = nn.Module(), nn.Module()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.rand(WIDTH) + 0.5))
                self.inner.register_buffer(name, torch.rand(WIDTH))
                self.scales.add_module(name, nn.LayerNorm(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.a(x))
            for name in names:
                kept = self.inner._buffers[name]
                assert kept is not None
                with torch.no_grad():
                    kept.mul_(0.9).add_(z.mean(0), alpha=0.1)
                z = self.scales._modules[name](z * self._parameters[name] - kept)  # type: ignore
            return self.h(z.relu() / (1 + z.std(1, keepdim=True)))

    return Named


def _by_number(*names: str) -> str:
    """What is captured of a model with these names, without any name."""
    training = trains_of(_named(*names))
    graph = capture(task(training), example(training))
    assert len({op.name for op in graph.ops}) == len(graph.ops)
    tensors = [source.tensor for source in graph.sources]
    tensors += [made for op in graph.ops for made in op.makes]
    assert len({*tensors}) == len(tensors)
    numbers = {tensor: k for k, tensor in enumerate(tensors)}
    return str([(op.target, [numbers[n] for n in op.inputs]) for op in graph.ops])


@pytest.mark.thorough
def test_what_is_captured_does_not_depend_on_names() -> None:
    names = (*WORDS.split(), *SIGNS.split(), "a b")
    assert _by_number(*names) == _by_number(*(f"n{k:03}" for k in range(len(names))))


class Inside(nn.Module):
    """A model whose first submodule is called `loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)


def test_a_submodule_that_is_called_loss_is_not_the_loss() -> None:
    training = trains_of(Inside)
    graph = capture(task(training), example(training))
    modules = {op.module for op in graph.ops if op.target == "aten.mm.default"}
    assert {op.module for op in graph.ops} == {"model.loss", "loss"}
    assert modules == {"model.loss"}


def test_a_submodule_whose_names_mean_the_loss_is_refused() -> None:
    def make() -> nn.Module:
        model = Inside()
        model.task = Inside()
        return model

    training = trains_of(make)
    with pytest.raises(RecipeError, match=r"the name of task\.loss\.weight is reserved"):
        capture(task(training), example(training))


class EveryOp(nn.Module):
    """A parameter with the name of each op that has a table."""

    def __init__(self) -> None:
        super().__init__()
        for name in OPS:
            self.register_parameter(name, nn.Parameter(torch.rand(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([self._parameters[name] for name in OPS]).mean(0)  # type: ignore


def test_no_name_of_an_op_meets_that_of_a_parameter() -> None:
    training = trains_of(EveryOp)
    graph = capture(task(training), example(training))
    made = {name for op in graph.ops for name in op.makes}
    assert not made & {v.tensor for v in graph.variables}
    assert not {tensor_of_node(name) for name in OPS} & {v.tensor for v in graph.variables}
    assert [v.name for v in graph.variables] == OPS


@pytest.mark.parametrize("layout", [DATA, TENSOR, STAGES, ZERO], ids=str)
def test_a_model_trains_as_plain_torch_whatever_its_names(layout: Layout) -> None:
    names = ("mean", "std", "exp_avg/mean", "loss", "grad", "x/pinned", "tangent", "mm'")
    assert_trains_alike(trains_of(_named(*names)), layout)


class Rivals(nn.Module):
    """Parameters called as the states of one another, and as what passes make of them."""

    names = ("w", "momentum_buffer/w", "grad/w", "w'", "grad", "before", "sum", "update/w")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.rand(WIDTH) + 0.5))
        self.topk = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])
        self.batch = nn.Module()
        self.batch.x = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.a(x)) * self.batch.x
        for name in self.names:
            z = z * self._parameters[name]  # type: ignore[operator]
        values, _ = z.topk(WIDTH, dim=1)
        return self.h(values * self.topk[0] + self.topk[1])


@pytest.mark.parametrize("layout", [STAGES, ZERO], ids=str)
def test_names_of_states_and_gradients_are_free_for_parameters(layout: Layout) -> None:
    assert_trains_alike(trains_of(Rivals), layout)


def test_a_state_that_a_parameter_is_called_like_has_another_name() -> None:
    graph = compiled(trains_of(Rivals), DATA).plan.graph
    names = [v.name for v in graph.variables]
    assert len({*names}) == len(names)
    assert {"momentum_buffer/w", "momentum_buffer/w~"} <= {*names}
    (state,) = [v for v in graph.variables if v.name == "momentum_buffer/w~"]
    assert (state.kind, state.of) == ("state", "w")


def test_fields_of_a_batch_may_have_any_name_too() -> None:
    fields = ("x", "mean", "batch.x", "x'", "x@0", "a b")

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, **values: Tensor) -> Tensor:
            return sum(values.values(), self.w).mean()  # type: ignore[arg-type]

    batch = {field: torch.full((2, 3), float(k)) for k, field in enumerate(fields)}
    graph = capture(Task(Many(), {f"v{k}": f for k, f in enumerate(fields)}), batch)
    assert [feed.field for feed in graph.feeds if not feed.is_own] == list(fields)
    assert len({tensor_of_field(field) for field in fields}) == len(fields)


NAMES = "mean mean.0 mean_0 a.mean a.0.mean batch.x a' a/b a.b' . é.é"


@pytest.mark.parametrize(("one", "other"), list(pairwise(NAMES.split())))
def test_no_two_variables_have_one_tensor(one: str, other: str) -> None:
    assert tensor_of_variable(one) != tensor_of_variable(other)
