"""A searched layout trains, and evaluates, as plain torch does."""

from dataclasses import replace

import pytest

from flowrun.engine.compile import Compilation
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.network import Level
from flowrun.engine.ir.sbp import Split
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.strategy import Auto
from support.layouts.grids import Layout, example, initial, run_plan, strategy, task
from support.layouts.plain_loop import gpt, loss_difference, plain_evaluation, plain_loop

STEPS, TOLERANCE = 5, 1e-5
FAST = Hardware(levels=(Level(0, 1e-7, 1e11),), op_s=1e-7, act_s=1e-7)  # so that splits pay off


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [(Layout(tensor=2), 2), (Layout(data=2, zero=1), 2), (Layout(data=2, tensor=2), 1)],
    ids=str,
)
def test_a_searched_layout_trains_and_evaluates_as_plain_torch(layout: Layout, blocks: int) -> None:
    training = gpt(blocks=blocks, width=16, micro_batches=2)
    asked = replace(strategy(training, layout), pins=(), auto=Auto(enabled=True), hardware=FAST)
    made = Compilation(task(training), example(training), asked)
    plan = made.training.plan
    assert any(note.startswith("auto: ") for note in plan.graph.notes)
    assert any(isinstance(sbp, Split) for op in plan.graph.ops for nd in op.out_sbp for sbp in nd)
    found = run_plan(training, plan, STEPS)
    plain = plain_loop(training, steps=STEPS)
    assert loss_difference(found.losses, plain) <= TOLERANCE
    evaluation = made.evaluation(made.capture_evaluation()).plan
    measured = VirtualCluster(evaluation, training.rows, {**initial(training), **plain.after})
    for one, other in zip(measured.run(2), plain_evaluation(training, plain.after, 2), strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
