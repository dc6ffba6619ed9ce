from typing import Any

import pytest
import torch
from torch import nn
from torch._decomp import decompositions

from flowrun.engine.capture.capture import Task, trace
from flowrun.engine.capture.check.compare import check_capture
from flowrun.engine.ops.traits import is_random


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_layers_on_a_batch_and_dropout_between_them_are_captured(kind: str) -> None:
    cells = getattr(nn, kind)(4, 4, 3, dropout=0.5, bidirectional=True)
    task: Any = Task(cells, {"input": "x"}, lambda output, batch: output[0].square().mean())
    batches = [{"x": torch.randn(3, 2, 4)} for _ in range(2)]
    actual = trace(task, batches[0])
    assert sum(is_random(op.target) for op in actual.graph.ops) == 2
    values = {name: tensor.detach().clone() for name, tensor in task.tensors.items()}
    assert check_capture(task, batches, actual, values) == ""


def test_torch_is_left_as_it_was() -> None:
    before = decompositions._rnn_helper, decompositions.select_one_layer_lstm_function
    test_layers_on_a_batch_and_dropout_between_them_are_captured("RNN")
    assert before == (decompositions._rnn_helper, decompositions.select_one_layer_lstm_function)
