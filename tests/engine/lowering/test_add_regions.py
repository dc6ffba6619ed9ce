from dataclasses import replace
from functools import partial

import pytest

from flowrun.engine.ir.graph import FORWARD, PHASES, LogicalGraph
from flowrun.engine.lowering.add_regions import form_regions, is_communication
from flowrun.engine.ops.flow.random import DROPOUT_MASK
from flowrun.engine.pipeline import PASSES
from flowrun.engine.strategy import Recompute, Strategy, Zero
from flowrun.models.gpt import GPT
from support.layouts.grids import LAYOUTS, Layout, compiled
from support.layouts.plain_loop import CONTEXT, TINY_GPT, VOCABULARY, WIDTH, seeded
from support.plans.graph_text import one_axis, one_rank_stages, rewritten

STRATEGIES: dict[str, Strategy] = {
    "data": one_axis("data"),
    "tensor": one_axis("tensor"),
    "ZeRO 2": one_axis("data", zero=Zero("data", 2, 1)),
    "ZeRO 3": one_axis("data", zero=Zero("data", 3, 1)),
    "stages": one_rank_stages(2, stage_modules=(("a", "act"), ("b",))),
}
HYBRIDS = [x for x in LAYOUTS if x.data * x.tensor * x.stages > 4 or x.zero == 3 or x.grids]


def assert_regions_can_run(graph: LogicalGraph) -> None:
    """Each op once; regions and moving boxings, as wholes, read only what was made before."""
    regions = form_regions(graph)
    inside = {op.name: k for k, region in enumerate(regions) for op in region.ops}
    assert sorted(inside) == sorted(op.name for op in graph.ops if not is_communication(op))
    node = {op.name: inside.get(op.name, op.name) for op in graph.ops}
    before: dict[object, set[object]] = {n: set() for n in node.values()}
    for op in graph.ops:
        for name in op.inputs:
            maker = graph.producer.get(name)
            if maker is not None and node[maker.name] != node[op.name]:
                before[node[op.name]].add(node[maker.name])
    done: set[object] = set()
    while ready := [n for n, needs in before.items() if n not in done and needs <= done]:
        done.update(ready)
    assert len(done) == len(before), "regions wait for each other in a circle"


@pytest.mark.parametrize("strategy", list(STRATEGIES.values()), ids=list(STRATEGIES))
def test_regions_of_two_layers_never_wait_for_each_other_in_a_circle(strategy: Strategy) -> None:
    assert_regions_can_run(rewritten(PASSES, strategy))


@pytest.mark.parametrize("layout", HYBRIDS, ids=str)
def test_regions_of_a_gpt_never_wait_for_each_other_in_a_circle(layout: Layout) -> None:
    assert_regions_can_run(compiled(TINY_GPT, layout).plan.graph)


def test_equal_blocks_of_a_gpt_make_equal_regions() -> None:
    regions = form_regions(compiled(TINY_GPT, Layout(tensor=2, clip_norm=0.5)).plan.graph)
    forward = PHASES.index(FORWARD)
    by_block = {
        block: [
            [op.target for op in r.ops] for r in regions if (r.unit, r.key[1]) == (block, forward)
        ]
        for block in ("blocks.1", "blocks.2")
    }
    assert by_block["blocks.1"] == by_block["blocks.2"] != []


def test_a_mask_of_dropout_is_drawn_where_it_is_first_read() -> None:
    """It waits for nothing: else masks of all blocks would be drawn before the first block."""
    made = partial(seeded, partial(GPT, VOCABULARY, CONTEXT, 2, 4, WIDTH, dropout=0.1))
    layout = Layout(tensor=2, recompute=Recompute(("blocks.*",)))
    graph = compiled(replace(TINY_GPT, model=made), layout).plan.graph
    inside = {op.name: r.name for r in form_regions(graph) for op in r.ops}
    masks = [op for op in graph.ops if (op.target, op.phase) == (DROPOUT_MASK, FORWARD)]
    masks = [op for op in masks if op.module.startswith("blocks")]  # others wait for backward
    assert masks
    for mask in masks:
        assert inside[mask.name] in {inside[r.name] for r in graph.consumers[mask.makes[0]]}
