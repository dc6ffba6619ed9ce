"""Ops that make nothing, such as asserts: left out with a note, or run (engine.check)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.capture.capture import capture
from flowrun.engine.compile import Compilation
from flowrun.engine.errors import RunError
from support.layouts.grids import Layout, compiled, example, run_plan, strategy, task
from support.nets.odd_models import DATA, SINGLE, STAGES, STEPS, WIDTH, Asserting, Net, trains_of


class OneHot(Net):
    """F.one_hot looks whether its classes are in range."""

    def between(self, z: Tensor) -> Tensor:
        return z + F.one_hot(z.argmax(1), WIDTH)


class Solved(Net):
    """torch.linalg looks whether a matrix is singular, by an op that torch orders by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))

    def between(self, z: Tensor) -> Tensor:
        s = self.m @ self.m.T + torch.eye(WIDTH)
        made: Tensor = torch.linalg.solve(s, z.T).T + z @ torch.linalg.inv(s)
        return made @ torch.linalg.cholesky(s)


class Strict(Asserting):
    bound = -100.0


def test_a_note_names_what_is_left_out_and_where() -> None:
    training = trains_of(OneHot)
    (note,) = capture(task(training), example(training)).notes
    assert note == (
        "aten._assert_async.msg in the model returns nothing and is left out;"
        " engine.check=true runs it"
    )


def _run_checked(model: type[Net], layout: Layout) -> tuple[float, ...]:
    training = trains_of(model)
    checked = replace(task(training), run_checks=True)
    plan = Compilation(checked, example(training), strategy(training, layout)).training.plan
    assert any(op.target == "flow.check" for op in plan.graph.ops)
    assert not any("left out" in note for note in plan.graph.notes)
    return run_plan(training, plan, STEPS).losses


@pytest.mark.parametrize("layout", [SINGLE, DATA, STAGES], ids=str)
def test_with_engine_check_they_run(layout: Layout) -> None:
    for model in (OneHot, Solved, Asserting):
        assert len(_run_checked(model, layout)) == STEPS
    with pytest.raises(RunError, match=r"a hidden value is too large \(the model, odd_models.py:"):
        _run_checked(Strict, layout)


def test_without_it_nothing_is_asserted() -> None:
    training = trains_of(Strict)
    assert len(run_plan(training, compiled(training, SINGLE).plan, STEPS).losses) == STEPS
