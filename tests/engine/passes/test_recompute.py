from dataclasses import replace
from functools import cache

import pytest
import torch

from flowrun.engine.actors.plan import RegionWork
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, FORWARD, TRAINED, WEIGHT_GRAD, Op
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.traits import has, is_view
from flowrun.engine.passes.recompute import find_stored, recompute
from flowrun.engine.passes.search.search_sbp import assign_sbp
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Recompute
from support.layouts.grids import Layout, Run, captured, compiled, strategy, virtual_run
from support.layouts.plain_loop import gpt
from support.plans.graph_text import TWO_LAYERS, graph_of, one_rank_stages, rewritten, through

GPT = gpt(blocks=2, width=16)
KEPT = [(), ("matmul",), ("boxing",), ("every_second_matmul", "attention")]
WHOLE = Recompute(("blocks.*",), whole=True)
STEPS = 3
LAYOUTS = [Layout(), Layout(tensor=2), Layout(stages=2), Layout(data=2, zero=3)]
ANY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def checkpointed(layout: Layout, *keep: str) -> Layout:
    return replace(layout, recompute=Recompute(("blocks.*",), keep))


@cache
def run(layout: Layout) -> Run:
    return virtual_run(GPT, layout, STEPS)


# ---- the same bits, in less memory ---------------------------------------------------------------


@ANY_LAYOUT
@pytest.mark.parametrize(
    "how",
    [*(Recompute(("blocks.*",), keep) for keep in KEPT), WHOLE, replace(WHOLE, keep=KEPT[-1])],
    ids=str,
)
def test_no_bit_changes(layout: Layout, how: Recompute) -> None:
    plain, again = run(layout), run(replace(layout, recompute=how))
    assert again.losses == plain.losses
    assert all(torch.equal(again.weights[k], value) for k, value in plain.weights.items())


def test_a_whole_block_runs_again_but_for_the_sum_that_the_next_one_stores() -> None:
    """Backward reads no result of fc2, nor of what is added to it."""

    def products(found: Layout) -> list[str]:
        return sorted(
            op.name for op in ops_of(found) if op.name.endswith("/again") and has_product(op)
        )

    bare, whole = products(checkpointed(Layout())), products(replace(Layout(), recompute=WHOLE))
    assert len(whole) - len(bare) == 2  # fc2 of each of 2 blocks
    forward = [op for op in ops_of(Layout()) if op.phase == FORWARD and has_product(op)]
    assert len(whole) == len([op for op in forward if op.module.startswith("blocks.")])


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], Layout(data=2)], ids=str)
def test_a_whole_block_holds_no_more_and_gathers_no_more(layout: Layout) -> None:
    """A copy that nobody reads runs with its block: its input does not wait for the end."""
    (bare_2, whole_2), (bare_4, whole_4) = (
        [
            compiled(gpt(blocks, width=16), replace(layout, recompute=form)).rehearsal
            for form in (replace(WHOLE, whole=False), WHOLE)
        ]
        for blocks in (2, 4)
    )
    for stage in range(layout.stages):
        added = bare_4.peak_bytes[stage] - bare_2.peak_bytes[stage]  # by each further block
        assert whole_4.peak_bytes[stage] - whole_2.peak_bytes[stage] <= added
    if layout.tensor == 1:  # else the sum of what nobody reads is sent, too
        assert whole_4.sent_bytes == bare_4.sent_bytes


def test_a_view_that_nobody_reads_is_not_made_again() -> None:
    """It would be the first to read a gathered weight, and as it waits for nothing, all weights
    would be gathered when backward begins.
    """
    ops = ops_of(replace(LAYOUTS[-1], recompute=replace(WHOLE, keep=("every_second_matmul",))))
    read = {name for op in ops for name in op.inputs}
    views = [op for op in ops if op.name.endswith("/again") and is_view(op.target)]
    assert views and all(read.intersection(op.makes) for op in views)


def test_what_a_whole_block_keeps_is_stored_also_where_backward_does_not_read_it() -> None:
    """As by torch's selective checkpointing: fc2's product is."""
    ops = ops_of(replace(Layout(), recompute=replace(WHOLE, keep=("matmul",))))
    late = {name for op in ops if op.phase == BACKWARD for name in op.inputs}
    kept = [op for op in ops if op.phase == FORWARD and has_product(op) and "blocks" in op.module]
    assert kept and all(late.intersection(op.makes) for op in kept)


def has_product(op: Op) -> bool:
    return has(op.target, Trait.PRODUCT)


def stash_bytes(layout: Layout) -> list[int]:
    """Bytes of all slots that wait for backward, by stage."""
    plan = compiled(GPT, layout).plan
    stages = range(len(plan.placements))
    return [
        sum(r.slots * r.num_bytes for r in plan.registers if r.stash and r.stage == s)
        for s in stages
    ]


@ANY_LAYOUT
def test_the_stash_falls_and_falls_less_with_products_kept_and_so_does_the_peak(
    layout: Layout,
) -> None:
    forms = (layout, checkpointed(layout, "matmul"), checkpointed(layout))
    for plain, kept, bare in zip(*map(stash_bytes, forms), strict=True):
        assert bare < kept < plain
    peaks = (compiled(GPT, form).rehearsal.peak_bytes for form in forms)
    for plain, kept, bare in zip(*peaks, strict=True):
        assert max(bare, kept) < plain  # with a block or two a stage, one being recomputed is most


@pytest.mark.parametrize(
    ("keep", "again"),
    {
        (): "qkv attention proj fc1",
        ("matmul",): "",
        ("attention",): "proj fc1 qkv",  # qkv's follows, as attention's backward reads it
        ("every_second_matmul",): "attention proj",  # qkv and fc1 are kept
        ("every_second_matmul", "attention"): "proj",
        ("boxing",): "qkv attention proj fc1",
    }.items(),
    ids=str,
)
def test_products_that_are_kept_do_not_run_again(keep: tuple[str, ...], again: str) -> None:
    copies = [op for op in ops_of(checkpointed(Layout(), *keep)) if op.name.endswith("/again")]
    products = [
        "attention" if "attention" in op.target else op.module.rpartition(".")[2]
        for op in copies
        if has_product(op) and op.module.startswith("blocks.1.")
    ]
    assert products == again.split()


# ---- when it starts ------------------------------------------------------------------------------


@ANY_LAYOUT
def test_a_copy_reads_nothing_that_forward_made_but_after_a_gradient(layout: Layout) -> None:
    graph = compiled(GPT, checkpointed(layout)).plan.graph
    feeds = {feed.tensor for feed in graph.feeds}
    copies = [op for op in graph.ops if op.name.endswith("/again")]
    assert copies
    for op in copies:
        assert op.phase == BACKWARD
        assert not feeds.intersection(op.inputs)
        makers = [graph.producer[name] for name in op.inputs if name in graph.producer]
        assert all(maker.phase != FORWARD for maker in makers)


@ANY_LAYOUT
def test_what_is_recomputed_starts_when_backward_has_begun(layout: Layout) -> None:
    """Backward begins with the loss, in which nothing is recomputed."""
    plan = compiled(GPT, checkpointed(layout))
    works = {a.id: a.work for a in plan.plan.actors if isinstance(a.work, RegionWork)}
    begun: set[int] = set()  # micro-batches
    again: set[int] = set()
    for event in sorted(plan.rehearsal.first_step, key=lambda event: event.start):
        ops = works[event.actor].ops if event.actor in works else ()
        if any(op.name.endswith("/again") for op in ops):
            assert event.act in begun
            again.add(event.act)
        elif any(op.phase == BACKWARD and op.module == "loss" for op in ops):
            begun.add(event.act)
    assert again == begun == set(range(GPT.micro_batches))


def test_weight_gradients_of_what_is_recomputed_do_not_run_late() -> None:
    layout = Layout(stages=2, in_flight="zero_bubble")
    late = [op.module for op in ops_of(layout) if op.phase == WEIGHT_GRAD]
    assert any(module.startswith("blocks.") for module in late)
    late = [op.module for op in ops_of(checkpointed(layout)) if op.phase == WEIGHT_GRAD]
    assert late and not any(module.startswith("blocks.") for module in late)


def ops_of(layout: Layout) -> tuple[Op, ...]:
    return compiled(GPT, layout).plan.graph.ops


@pytest.mark.parametrize("keep", [k for k in KEPT if k != ("boxing",)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_waits_for_backward_is_known_before_ops_have_layouts(
    layout: Layout, keep: tuple[str, ...]
) -> None:
    given, all_stored = strategy(GPT, checkpointed(layout, *keep)), strategy(GPT, layout)
    trained = advance(captured(GPT), given, TRAINED)
    stored = find_stored(trained, given)
    assert stored == find_stored(recompute(assign_sbp(trained, given), given), all_stored)
    assert len(stored) < len(find_stored(trained, all_stored))


# ---- communication -------------------------------------------------------------------------------


def test_a_tensor_parallel_block_repeats_one_of_its_two_sums() -> None:
    """The sum after attention: nothing recomputed reads the sum after the feed-forward part."""
    plain, again = Layout(tensor=2), checkpointed(Layout(tensor=2))
    repeated = compiled(GPT, again).rehearsal.sent_bytes - compiled(GPT, plain).rehearsal.sent_bytes
    blocks, samples, tokens, width = 2, 16, 16, 16
    assert repeated == blocks * 2 * (2 - 1) * samples * tokens * width * 4  # a ring of 2 ranks
    note = compiled(GPT, again).plan.notes[0]
    assert f" {repeated / GPT.micro_batches:,.0f} bytes are communicated again" in note


def test_keeping_what_boxing_makes_repeats_none() -> None:
    plain, again = Layout(tensor=2), checkpointed(Layout(tensor=2), "boxing")
    assert compiled(GPT, again).rehearsal.sent_bytes == compiled(GPT, plain).rehearsal.sent_bytes


# ---- text in, text out ---------------------------------------------------------------------------


NET = TWO_LAYERS.replace(" a stage", " net.a stage").replace(" act stage", " net.act stage")


def test_the_note_says_what_runs_again_and_what_is_not_stored() -> None:
    strategy = one_rank_stages(1, recompute=Recompute(("net",)))
    graph = rewritten((*through(assign_sbp), recompute), strategy, graph_of(NET))
    assert graph.notes == (
        "recompute: stage 0 runs 2 ops again in backward; a rank stores 192 of 384 bytes less "
        "for a micro-batch",
    )


def test_what_is_made_of_weights_alone_is_not_counted_as_stored() -> None:
    """A copy of a weight that backward reads, as autocast makes them."""
    cast = NET.replace(
        "%bt = aten.t.default(%b.weight)",
        "%bc = aten.clone.default(%b.weight)  # forward b stage 0\n    %bt = aten.t.default(%bc)",
    ).replace("mm.default(%dy, %b.weight)", "mm.default(%dy, %bc)")
    strategy = one_rank_stages(1, recompute=Recompute(("net",)))
    first, second = (
        rewritten((*through(assign_sbp), recompute), strategy, graph_of(text))
        for text in (NET, cast)
    )
    assert len(second.ops) > len(first.ops)
    assert second.notes == first.notes


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"'block\.\*' matches no module") as error:
        compiled(GPT, Layout(recompute=Recompute(("blocks.0", "block.*"))))
    assert error.value.where == "recompute.modules"


def test_no_patterns_change_nothing() -> None:
    strategy = one_rank_stages(1)
    graph = rewritten(through(assign_sbp), strategy)
    assert recompute(graph, strategy) is graph
