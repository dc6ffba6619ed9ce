import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture, capture_evaluation
from flowrun.engine.capture.node_reader import MOST_NUMBERS
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph
from support.layouts.grids import example, task
from support.layouts.plain_loop import BLOCKS, TINY_GPT


class Inner(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x_BI: Tensor) -> Tensor:
        return torch.tanh(self.fc(x_BI)) * self.scale


class Net(nn.Module):
    """A module in a list, a layer after it, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner()])
        self.out = nn.Linear(3, 1, bias=False)

    def forward(self, x_BI: Tensor) -> tuple[Tensor]:
        return (self.out(self.blocks[0](x_BI)).square().mean(),)


# ---- what capture makes of it --------------------------------------------------------------------


def _sum_loss(output: tuple[Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return output[0] * batch["weight"].sum()


@pytest.fixture(scope="module")
def graph() -> LogicalGraph:
    """Of the small net, with a loss outside of it that reads another batch field."""
    small = Task(Net(), {"x_BI": "x"}, _sum_loss)
    return capture(small, {"x": torch.randn(5, 4), "weight": torch.ones(5)})


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_ops_know_the_users_module_in_both_phases(graph: LogicalGraph, phase: str) -> None:
    modules = {op.module for op in graph.ops if op.phase == phase}
    assert {"blocks.0", "blocks.0.fc", "out", "loss"} <= modules | {"blocks.0"}
    assert modules <= {"", "blocks.0", "blocks.0.fc", "out", "loss"}


def test_ops_of_a_gpt_belong_to_its_blocks_embedding_head_or_loss() -> None:
    gpt = capture(task(TINY_GPT), example(TINY_GPT))
    firsts = {op.module.split(".")[0] for op in gpt.ops}
    assert firsts <= {"embed", "blocks", "norm", "head", "loss", ""}
    unplaced = [op for op in gpt.ops if op.module == ""]
    assert not [op for op in unplaced if op.phase == FORWARD]
    blocks = {op.module.split(".")[1] for op in gpt.ops if op.module.startswith("blocks.")}
    assert blocks == {str(k) for k in range(BLOCKS)}


def test_only_shapes_of_the_example_count() -> None:
    batch = {"x": torch.randn(5, 4), "weight": torch.ones(5)}
    other = {"x": torch.full((5, 4), 1e9), "weight": torch.zeros(5)}
    torch.manual_seed(0)
    one, two = (capture(Task(Net(), {"x_BI": "x"}, _sum_loss), b) for b in (batch, other))
    assert str(one) == str(two)


def test_a_tied_weight_has_the_first_of_its_names_whichever_module_reads_it_first() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 6, bias=False), "embed": nn.Embedding(6, 4)})
    model["embed"].weight = model["head"].weight
    chain = nn.Sequential(model["embed"], model["head"])
    for outer in (model, chain):
        outer.forward = lambda x: model["head"](model["embed"](x))  # type: ignore[method-assign]
        small = Task(outer, {"x": "x"}, lambda output, batch: output.sum())
        graph = capture(small, {"x": torch.zeros(2, 3, dtype=torch.long)})
        ((first, _),) = outer.named_parameters()
        (other,) = set(outer.state_dict()) - {first}
        (variable,) = graph.variables
        assert (variable.name, variable.aliases) == (first, (other,))
        assert [name for name, _ in graph.results] == ["loss", f"grad/{first}"]


def test_the_models_own_loss_is_taken_where_the_task_names_none() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), _Mean())
    graph = capture(Task(model, {"input": "x"}), {"x": torch.ones(2, 4)})
    assert graph.results[0][0] == "loss"
    assert graph.tensors[graph.results[0][1]].shape == ()


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_a_buffer_that_forward_changes_is_read_before_and_written_after() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), _Mean())
    graph = capture(Task(model, {"input": "x"}), {"x": torch.ones(2, 4)})
    by_name = {v.name: v for v in graph.variables}
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        variable = by_name[name]
        readers = [op.target for op in graph.consumers[variable.tensor]]
        assert readers == ["flow.snapshot", "flow.assign"]
        assert graph.producer[variable.new or ""].target == "flow.assign"
    assert graph.running == {v.tensor for v in graph.variables if v.kind == "buffer"}


def test_backward_of_a_batch_norm_reads_no_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), _Mean())
    graph = capture(Task(model, {"input": "x"}), {"x": torch.ones(2, 4)})
    (op,) = (op for op in graph.ops if op.target == "aten.native_batch_norm_backward.default")
    assert op.args[3:5] == (None, None)


def test_evaluation_has_no_backward_and_reports_the_metrics() -> None:
    model = task(TINY_GPT)
    graph = capture_evaluation(model, example(TINY_GPT))
    assert {op.phase for op in graph.ops} == {FORWARD}
    assert [name for name, _ in graph.results] == ["loss", "accuracy"]
    assert {feed.field for feed in graph.feeds} == {"tokens", "targets"}
    assert model.model.training, "evaluation leaves the module in training mode"


# ---- what is made inside forward -----------------------------------------------------------------


def test_a_constant_tensor_made_in_forward_is_an_op_that_holds_its_numbers() -> None:
    graph = capture(Task(_Constant(3), {"x": "x"}), {"x": torch.ones(3, 4)})
    numbers, same = (op for op in graph.ops if op.target in ("flow.constant", "aten.full.default"))
    assert (numbers.args, same.args) == (((0.0, 1.0, 2.0), (3,)), ((), 2.0))
    assert [v.kind for v in graph.variables] == ["parameter"] * 2


_LOG = logging.getLogger(__name__)


class _Layer(nn.Module):
    """What a model of one layer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)


class _Talks(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        _LOG.warning("forward was called")
        return self.fc(x).sum()


def test_what_a_module_logs_is_left_out() -> None:
    graph = capture(Task(_Talks(), {"x": "x"}), {"x": torch.ones(3, 4)})
    assert graph.results[0][0] == "loss"


# ---- what is refused -----------------------------------------------------------------------------


class _Branches(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) if x.sum() > 0 else self.fc(-x)).sum()


class _Writes(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.clamp_(-0.1, 0.1)
        return self.fc(x).sum()


class _Chooses(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cond(y.mean() > 0, torch.relu, torch.tanh, (y,)).sum()


class _Constant(nn.Module):
    """Multiplies by the same number, many times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, count)
        self.numbers = list(range(count))

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.tensor(self.numbers, dtype=torch.float32)
        return (self.fc(x) * numbers + torch.tensor(2.0)).sum()


REFUSED = {
    "a branch on values": (_Branches(), "torch could not capture _Branches"),
    "a trained weight that forward changes": (
        _Writes(),
        r"forward writes into the parameter fc.weight, which is trained \(test_capture.py:\d+\)",
    ),
    "torch.cond": (_Chooses(), r"torch.cond is not supported \(test_capture.py:\d+\)"),
    "a long constant tensor": (
        _Constant(MOST_NUMBERS + 1),
        "makes a constant tensor of 4,097 numbers",
    ),
}


@pytest.mark.parametrize(("model", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_cannot_be_captured_is_refused_at_the_key_model(
    model: nn.Module, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        capture(Task(model, {"x": "x"}), {"x": torch.ones(3, 4)})
    assert error.value.where == "model"
    assert "\n" not in error.value.problem


# ---- simplification ------------------------------------------------------------------------------


def test_no_op_is_there_twice_or_for_nobody() -> None:
    gpt = capture(task(TINY_GPT), example(TINY_GPT))
    keys = [(op.target, repr(op.args), repr(op.kwargs), op.phase) for op in gpt.ops]
    assert len(set(keys)) == len(keys)
    used = {name for op in gpt.ops for name in op.inputs} | {name for _, name in gpt.results}
    assert not [op.name for op in gpt.ops if not used.intersection(op.makes)]


def test_capture_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch 2.11 complains of loggers that are to be ignored."""
    capture(task(TINY_GPT), example(TINY_GPT))
    assert capfd.readouterr() == ("", "")


def test_capture_opens_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps the state of CUDA's random numbers, where there is CUDA, from first to last."""

    def opened(*_: Any) -> None:
        raise AssertionError("CUDA is opened")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", opened)
    monkeypatch.setattr(torch.cuda, "set_rng_state", opened)
    with contextlib.suppress(RuntimeError):  # a build with CUDA on a machine without its driver
        torch.utils._triton.has_triton()
    assert capture(task(TINY_GPT), example(TINY_GPT)).ops
    assert torch.cuda.is_available()
    asked = torch.utils._triton.has_triton.cache_info()
    assert not asked.currsize, "torch keeps what it was given meanwhile"
