"""An op without a signature table: rows that hold by experiment are used; where none does every
rank does all of it.  One note says so, and the numbers are right.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.ir.sbp import B, S
from flowrun.engine.ops import registry
from support.layouts.grids import Layout, assert_as_plain_torch, compiled, virtual_run
from support.layouts.plain_loop import TINY_MLP, Training, seeded

STEPS = 5
TARGETS = {"flowrun_test.ripple.default", "flowrun_test.ripple_backward.default"}


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return torch.ops.flowrun_test.ripple_backward(grad, *ctx.saved_tensors)


@pytest.fixture(scope="module", autouse=True)
def _own_op() -> Iterator[None]:
    """An op that the engine has never heard of: x + sin(x), each row less its mean."""
    with torch.library._scoped_library("flowrun_test", "FRAGMENT") as library:
        library.define("ripple(Tensor x) -> Tensor")
        library.define("ripple_backward(Tensor grad, Tensor x) -> Tensor")
        library.define("level(Tensor x) -> Tensor")
        library.impl("level", _level, "CompositeExplicitAutograd")
        torch.library.register_fake("flowrun_test::level", torch.empty_like, lib=library)
        torch.library.register_autograd(
            "flowrun_test::level", lambda ctx, grad: torch.ops.flowrun_test.level(grad), lib=library
        )
        library.impl("ripple", _ripple, "CompositeExplicitAutograd")
        library.impl("ripple_backward", _ripple_backward, "CompositeExplicitAutograd")
        torch.library.register_fake("flowrun_test::ripple", torch.empty_like, lib=library)
        torch.library.register_fake(
            "flowrun_test::ripple_backward", lambda grad, x: torch.empty_like(x), lib=library
        )
        torch.library.register_autograd(
            "flowrun_test::ripple", _backward, setup_context=_save, lib=library
        )
        yield


def _ripple(x: Tensor) -> Tensor:
    y = x + x.sin()
    return y - y.mean(-1, keepdim=True)


def _ripple_backward(grad: Tensor, x: Tensor) -> Tensor:
    return (grad - grad.mean(-1, keepdim=True)) * (1 + x.cos())


def _level(x: Tensor) -> Tensor:
    """By the norm of all: no split holds.  It stands for its own gradient."""
    return x / (1 + x.norm())


class Rippled(nn.Module):
    """Two layers with an op between, twice."""

    def __init__(self, op: str = "ripple") -> None:
        super().__init__()
        self.op = op
        self.hidden = nn.Linear(64, 12)
        self.output = nn.Linear(12, 10)

    def forward(self, x_BI: Tensor) -> Tensor:
        op = getattr(torch.ops.flowrun_test, self.op)
        return self.output(op(op(self.hidden(x_BI))))


RIPPLED: Training = replace(TINY_MLP, model=partial(seeded, Rippled))
LEVELLED: Training = replace(
    TINY_MLP, model=partial(seeded, partial(Rippled, "level")), micro_batches=1
)


@pytest.mark.parametrize("training", [RIPPLED, LEVELLED], ids=["found", "whole"])
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2)], ids=str)
def test_an_op_that_nobody_knows_trains_as_in_plain_torch(
    layout: Layout, training: Training
) -> None:
    assert_as_plain_torch(training, virtual_run(training, layout, STEPS))


def test_rows_that_hold_are_found_and_noted_once() -> None:
    graph = compiled(RIPPLED, Layout(data=2)).plan.graph
    ops = [op for op in graph.ops if op.target in TARGETS]
    assert len(ops) == 4
    assert {op.out_sbp[0] for op in ops} == {(S(0),)}
    notes = [note for note in graph.notes if "found by experiment" in note]
    assert {note.split()[0] for note in notes} == TARGETS
    assert len(notes) == len(TARGETS)
    assert not [note for note in graph.notes if "no signature table" in note]


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2)], ids=str)
def test_what_no_row_holds_for_is_whole_on_every_rank_and_noted_once(layout: Layout) -> None:
    graph = compiled(LEVELLED, layout).plan.graph
    ops = [op for op in graph.ops if op.target == "flowrun_test.level.default"]
    assert len(ops) == 4
    assert not [op for op in ops if {*op.in_sbp, *op.out_sbp} != {(B,)}]
    (note,) = (note for note in graph.notes if "no signature table" in note)
    assert note.startswith("flowrun_test.level.default")


def test_where_no_axis_divides_it_nothing_is_noted() -> None:
    assert not compiled(RIPPLED, Layout(stages=2)).plan.graph.notes


def test_the_op_has_no_table() -> None:
    assert not [target for target in TARGETS if registry.has_table(target)]
