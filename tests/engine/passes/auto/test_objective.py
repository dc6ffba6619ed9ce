"""What a layout holds: as many micro-batches as the registers of its plan have slots."""

from __future__ import annotations

import pytest

from flowrun.engine.graph import LogicalGraph
from flowrun.engine.passes.auto.objective import Objective
from flowrun.engine.passes.auto.rows import Rows
from flowrun.engine.passes.split_stages import split_stages
from flowrun.engine.placement import Placement
from flowrun.engine.strategy import Strategy
from support.graph_text import two_layers
from support.unit_pipeline import unit_plan

MICRO_BATCHES = 5
MODULES = {1: (), 2: (("a",), ("act", "b"))}  # of the stages


def held_bytes(name: str, graph: LogicalGraph, strategy: Strategy) -> float:
    """Of a tensor, by the search's account."""
    op = graph.producer[name]
    (held,) = Objective(graph, strategy).row_bytes(op, Rows(graph, strategy).of(op))
    return float(held)


@pytest.mark.parametrize("in_flight", ["1f1b", "gpipe", "zero_bubble", "auto", 3, 9], ids=str)
@pytest.mark.parametrize("stages", [1, 2])
def test_the_search_counts_the_slots_that_a_plan_has(stages: int, in_flight: int | str) -> None:
    """%r, (6, 8) in fp32, is made on the last stage and read by its backward."""
    placements = tuple(Placement((("data", 1),), (rank,)) for rank in range(stages))
    strategy = Strategy(
        ("data",),
        placements,
        stage_modules=MODULES[stages],
        micro_batches=MICRO_BATCHES,
        in_flight=in_flight,
    )
    graph = split_stages(two_layers(), strategy)
    last = stages - 1
    assert graph.producer["r"].stage == last
    registers = unit_plan(stages, MICRO_BATCHES, in_flight).registers
    (slots,) = {r.slots for r in registers if r.stash and r.stage == last}
    assert held_bytes("r", graph, strategy) == slots * 6 * 8 * 4
