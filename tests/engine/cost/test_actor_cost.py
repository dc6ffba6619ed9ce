from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import RegionWork
from flowrun.engine.compile import Compilation
from flowrun.engine.ir.graph import FORWARD
from flowrun.engine.strategy import Strategy
from support.layouts.grids import Layout, example, strategy, task
from support.layouts.plain_loop import mlp

TRAINING = mlp()


def forward_seconds(given: Strategy) -> tuple[float, int]:
    """Of all forward regions in a step; and how many products with a bias they have."""
    plan = Compilation(task(TRAINING), example(TRAINING), given).training.plan
    regions = [a for a in plan.actors if isinstance(a.work, RegionWork) and a.phase == FORWARD]
    ops = [op for actor in regions for op in actor.work.ops]  # type: ignore[union-attr]
    return sum(a.seconds for a in regions), sum("addmm" in op.target for op in ops)


@pytest.mark.parametrize("fusion", ["", "compiled"], ids=["eager", "compiled"])
def test_a_bias_apart_costs_a_pass_unless_a_compiler_adds_it_later(fusion: str) -> None:
    given = replace(strategy(TRAINING, Layout()), fusion=fusion)
    apart = replace(given, hardware=replace(given.hardware, bias_apart=True))
    one, with_bias = forward_seconds(given), forward_seconds(apart)
    assert one[1] > 0
    if fusion:
        assert with_bias == one
    else:
        assert with_bias[0] - one[0] >= one[1] * given.hardware.op_s
