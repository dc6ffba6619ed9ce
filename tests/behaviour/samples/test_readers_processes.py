"""Samples made in steps, on real gloo processes: threads beside compute on each rank."""

from pathlib import Path

import pytest

from support.layouts.gloo import run_on_gloo
from support.layouts.grids import Layout, compiled, run_plan
from support.layouts.plain_loop import TINY_MLP
from support.layouts.stepwise import STEPWISE_MLP, plan

pytestmark = pytest.mark.processes

STEPS = 4


def test_a_chain_trains_on_processes_as_reading_at_once_does_in_one(tmp_path: Path) -> None:
    layouts = (Layout(data=2), Layout(stages=2))
    jobs = {str(layout): (STEPWISE_MLP, plan(layout)) for layout in layouts}
    found = run_on_gloo(jobs, 2, STEPS, tmp_path)
    for layout in layouts:
        at_once = run_plan(STEPWISE_MLP, compiled(TINY_MLP, layout).plan, STEPS)
        assert found[str(layout)].losses == pytest.approx(at_once.losses, rel=1e-6)
