from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flowrun.engine.capture.capture import Task, capture, capture_evaluation, trace
from flowrun.engine.capture.check.compare import check_capture
from flowrun.engine.ops.flow.recurrent import BACKWARD, FORWARD
from flowrun.engine.ops.traits import is_random
from support.checks.bf16_lstm import need_lstm

BATCH = {"x": torch.randn(3, 2, 4)}


def task_of(
    layers: nn.Module,
    loss: Callable[[Any], Any] = lambda output: output[0],
    autocast: torch.dtype | None = None,
) -> Task:
    measure = lambda output, _: loss(output).float().square().mean()  # noqa: E731
    return Task(layers, {"input": "x"}, measure, autocast=autocast)


def is_exact(task: Task) -> bool:
    values = {name: tensor.detach().clone() for name, tensor in task.tensors.items()}
    batches = [BATCH, {"x": torch.randn(3, 2, 4)}]
    return check_capture(task, batches, trace(task, BATCH), values) == ""


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_layer_of_both_ways_is_an_op_and_dropout_between_layers_another(
    kind: str, autocast: torch.dtype | None
) -> None:
    need_lstm(kind, autocast)
    layers = getattr(nn, kind)(4, 4, 3, dropout=0.5, bidirectional=True)
    task = task_of(layers, autocast=autocast)
    targets = [op.target for op in trace(task, BATCH).graph.ops]
    assert targets.count(FORWARD) == targets.count(BACKWARD) == 3
    assert sum(map(is_random, targets)) == 2
    assert is_exact(task)


@pytest.mark.parametrize(
    "layers",
    [
        nn.LSTM(4, 5, 2, proj_size=3, batch_first=True),
        nn.GRU(4, 5, bias=False),
        nn.RNN(4, 5, nonlinearity="relu"),
        nn.LSTM(4, 5, bidirectional=True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_last_states_are_what_torch_makes(layers: Any) -> None:
    def last(output: Any) -> torch.Tensor:
        states = output[1] if isinstance(output[1], tuple) else output[1:]
        return torch.cat([state.flatten() for state in states]).exp()

    assert is_exact(task_of(layers, last))


def test_the_number_of_ops_does_not_depend_on_the_number_of_steps() -> None:
    layers = nn.LSTM(4, 4)
    counts = {
        len(capture(task_of(layers), {"x": torch.zeros(steps, 2, 4)}).ops) for steps in (2, 64)
    }
    assert len(counts) == 1


def test_a_call_of_torchs_function_is_captured_as_a_modules_is() -> None:
    class Direct(nn.GRU):
        def forward(self, input: Any) -> Any:  # type: ignore[override]
            state = input.new_zeros(1, 2, 4)
            given = (list(self.parameters()), True, 1, 0.0, True, False, False)
            return torch.gru(input, state, *given)

    task = task_of(Direct(4, 4))
    assert FORWARD in [op.target for op in capture(task, BATCH).ops]
    assert is_exact(task)


def test_evaluation_keeps_nothing_for_backward() -> None:
    graph = capture_evaluation(task_of(nn.GRU(4, 4, 2, dropout=0.5)), BATCH)
    layers = [op for op in graph.ops if op.target == FORWARD]
    assert [(op.args[-2], op.outputs[-1]) for op in layers] == [(False, None)] * 2
    assert not any("dropout" in op.target for op in graph.ops)
