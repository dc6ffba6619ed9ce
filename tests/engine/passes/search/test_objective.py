from dataclasses import replace

import pytest

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B
from flowrun.engine.passes.search.make_network import make_network
from flowrun.engine.passes.search.objective import Objective
from flowrun.engine.passes.search.options import Options, RowTables
from flowrun.engine.passes.search.search_network import search
from flowrun.engine.passes.search.search_sbp import BYTES_ALONE, search_by_memory
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.strategy import Auto, Strategy
from support.plans.graph_text import one_axis, two_layers
from support.plans.unit_pipeline import unit_plan

MICRO_BATCHES = 5
MODULES = {1: (), 2: (("a",), ("act", "b"))}  # of the stages


def held_bytes(name: str, graph: LogicalGraph, strategy: Strategy) -> float:
    """Of a tensor, by the search's account."""
    op = graph.producer[name]
    (held,) = Objective(graph, strategy).row_bytes(op, RowTables(graph, strategy).of(op))
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


def test_a_rank_holds_what_its_own_stage_holds() -> None:
    """Memory is of one rank: a model that fits when each stage has its half needs no lighter
    layout.
    """
    placements = tuple(Placement((("data", 1),), (rank,)) for rank in range(2))
    strategy = Strategy(("data",), placements, stage_modules=MODULES[2], auto=Auto(enabled=True))
    graph = split_stages(two_layers(), strategy)
    rows, objective = RowTables(graph, strategy), Objective(graph, strategy)
    options = Options.of(graph, rows)
    net = make_network(graph, options, objective)
    actual = search(net)
    held = [0.0, 0.0]
    for op, k in zip(graph.ops, actual.choice, strict=False):
        held[op.stage] += float(objective.row_bytes(op, rows.of(op))[k])
    for v in graph.variables:
        held[v.stage] += objective.home_bytes(v, options.homes_at(actual.choice)[v.tensor])
    for name, readers in graph.consumers.items():  # what comes from the other stage is a copy
        maker = graph.producer.get(name)
        for stage in {op.stage for op in readers if maker and op.stage != maker.stage}:
            held[stage] += objective.copy_bytes(name, Location(stage, (B,)))
    assert min(held) > 0
    assert net.cost(actual.choice)[1] == max(held)

    def asked(limit: float) -> float:
        hardware = replace(strategy.hardware, memory_bytes=int(limit))
        limited = replace(strategy, hardware=hardware)
        return search_by_memory(lambda byte_s, *better: search(net, None, byte_s), net, limited)[1]

    assert asked(max(held)) == 0.0
    assert asked(max(held) - 1) == BYTES_ALONE  # there is one layout, so that nothing fits


def test_compute_counts_as_often_as_the_ratio_says() -> None:
    graph = two_layers()
    op = graph.producer["h"]

    def seconds(ratio: float) -> list[float]:
        strategy = one_axis("x", auto=Auto(enabled=True, computation_cost_ratio=ratio))
        return list(Objective(graph, strategy).row_seconds(op, RowTables(graph, strategy).of(op)))

    assert min(seconds(1.0)) > 0
    assert seconds(3.0) == pytest.approx([3 * s for s in seconds(1.0)])
    assert set(seconds(0.0)) == {0.0}
