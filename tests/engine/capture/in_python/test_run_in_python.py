"""What Dynamo cannot follow is captured while Python runs it: equal to the module, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import torch_compilable_check

from flowrun.engine.capture.capture import (
    CapturedModule,
    Task,
    Traced,
    capture_evaluation,
    rewrite_trace,
    trace,
)
from flowrun.engine.capture.check.compare import check_capture
from flowrun.engine.capture.check.interpret import interpret
from flowrun.engine.capture.in_python.frozen import freeze
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD
from flowrun.engine.ops.flow.check import ASSERT
from flowrun.engine.torch_internals import is_traced, node_meta
from support.checks import watched
from support.checks.thorough import few
from support.checks.two_ways import difference
from support.checks.watched import CHANGES, PYTHON, REFUSED, TRAIN, Body, Net
from support.layouts.grids import captured
from support.layouts.plain_loop import mlp
from support.nets.compositions import TOLERANCE, model_of

BATCHES = [{"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(k))} for k in (0, 1)]
NOTE = "captured while Python ran forward, as Dynamo stops at"


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.pow(2).mean() + output.mean()


def task_of(body: Body, **fields: Any) -> Task:
    torch.manual_seed(0)
    return Task(Net(body), {"x": "x"}, loss, **fields)


def traced(task: Task) -> Traced:
    with warnings.catch_warnings(action="ignore"):
        return trace(task, BATCHES[0])


@pytest.mark.parametrize("body", TRAIN)
def test_what_python_runs_is_what_the_module_computes(body: Body) -> None:
    task = task_of(body)
    found = traced(task)
    assert any(note.startswith(NOTE) for note in found.graph.notes)
    values = {name: tensor.detach().clone() for name, tensor in task.tensors.items()}
    with warnings.catch_warnings(action="ignore"):
        assert check_capture(task, BATCHES, found, values) == ""
    rewrite_trace(found, task)


@pytest.mark.parametrize("body", REFUSED)
def test_what_depends_on_python_is_refused(body: Body) -> None:
    task = task_of(body)
    with pytest.raises(RecipeError) as error:
        traced(task)
    assert REFUSED[body] in error.value.problem
    assert "watched.py" in error.value.problem
    if REFUSED[body] in (PYTHON, CHANGES):
        assert "Count in a buffer" in error.value.instead
    assert "fails in plain torch" not in error.value.problem
    assert not any(map(is_traced, vars(task.model).values()))


def test_what_is_held_is_compared_though_memory_is_used_again() -> None:
    def holding(value: int) -> Callable[[], int]:
        return lambda: value

    one, other = ([holding(value) for value in values] for values in ((1, 2, 3), (1, 2, 4)))
    assert freeze(one) == freeze(one) != freeze(other)


def test_ops_know_their_modules_and_lines() -> None:
    graph = traced(task_of(watched.norm_and_dropout)).graph
    modules = {(op.module, op.phase) for op in graph.ops}
    assert {(name, phase) for name in ("layer", "tied", "norm") for phase in ("forward",)} < modules
    assert ("layer", "backward") in modules
    assert all(op.line.startswith("watched.py:") for op in graph.ops if op.module == "norm")


def test_a_check_is_left_out_with_a_note_or_run() -> None:
    noted = traced(task_of(watched.checks_values)).graph
    assert any("aten._assert_async.msg in the model returns nothing" in n for n in noted.notes)
    run = traced(task_of(watched.checks_values, run_checks=True)).graph
    checks = [op for op in run.ops if op.target == ASSERT]
    assert len(checks) == 4
    values = {
        name: tensor.detach() for name, tensor in Net(watched.checks_values).named_parameters()
    }
    values["run"] = torch.zeros(4)
    wrong = {"x": torch.full((3, 4), 1e30)}
    with pytest.raises(AssertionError, match=r"a check raises: .*watched\.py"):
        interpret(run, {v.name: values[v.name] for v in run.variables}, wrong)


LIBRARY = """
def check(h):
    torch_compilable_check(
        h.abs() < 1e30, f"too large: {h.sum()}"
    )
    return h

def keep(h):
    text = f"{h.sum()}"
    return h * len(text)
"""


@pytest.mark.parametrize(("name", "trains"), [("check", True), ("keep", False)])
def test_what_a_library_writes_into_a_message_is_not_asked_for(
    name: str, trains: bool, tmp_path: Path
) -> None:
    file = tmp_path / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    names: dict[str, Any] = {"torch_compilable_check": torch_compilable_check}
    exec(compile(LIBRARY, str(file), "exec"), names)
    task = task_of(lambda net, h: names[name](h))
    if trains:
        assert any("_assert_async" in note for note in traced(task).graph.notes)
        return
    with pytest.raises(RecipeError, match="asks for the value"):
        traced(task)


def test_a_print_is_noted_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    notes = traced(task_of(watched.prints_and_warns)).graph.notes
    assert any(note.startswith("print is left out (") and "watched.py" in note for note in notes)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("body", [watched.norm_and_dropout, watched.assigns_a_buffer])
def test_evaluation_is_captured_alike(body: Body) -> None:
    task = task_of(body)
    graph = capture_evaluation(task, BATCHES[0])
    values = {name: tensor.detach() for name, tensor in task.tensors.items()}
    found = interpret(graph, {v.name: values[v.name] for v in graph.variables}, BATCHES[0])
    with torch.no_grad():
        expected = CapturedModule(task, ("x",), {}).eval()(BATCHES[0]["x"])[0]
    torch.testing.assert_close(found["loss"], expected)


def test_what_needs_gradients_is_not_evaluated_without() -> None:
    with pytest.raises(RecipeError, match=r"in evaluation.*fails in plain torch, too.*grad_fn"):
        capture_evaluation(task_of(watched.force), BATCHES[0])


@pytest.mark.parametrize("seed", few(range(20), (4, 7)))
def test_both_ways_give_the_same_numbers(seed: int) -> None:
    assert difference(model_of(seed)) <= TOLERANCE


def test_what_an_earlier_trace_has_left_names_no_module() -> None:
    node_meta()["nn_module_stack"] = {"loss": ("loss", nn.Module)}
    graph = captured.__wrapped__(mlp(micro_batches=1))
    modules = {op.module for op in graph.ops if op.phase == BACKWARD}
    assert len(modules) > 1 and "nn_module_stack" not in node_meta()
