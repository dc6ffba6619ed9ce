"""bf16: every layout trains as one rank does, and as torch's own autocast loop; what lives from
step to step is fp32.

bf16 has 8 bits: layouts that sum in another order differ by roundings of 2^-9 in products.  A loss
is a mean of many tokens, so that they mostly cancel: 1e-3 is about ten times what is seen.  The
same bound holds for fp32 beside bf16 over the few steps here.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flowrun.engine.actors.plan import BoxWork
from flowrun.engine.ir.graph import FORWARD
from flowrun.engine.runtime.kernels.cpu import products
from support.layouts.grids import (
    CLIP,
    FIVE,
    Layout,
    compiled,
    compiled_evaluation,
    run_plan,
    virtual_run,
)
from support.layouts.plain_loop import Training, gpt, micro_batch_loop, plain_loop

STEPS = 6
NOISE = 1e-3
FP32 = gpt(blocks=1, width=16)
BF16 = replace(FP32, autocast=torch.bfloat16)
ANY_LAYOUT = pytest.mark.parametrize(
    "layout", [*FIVE[1:], Layout(data=2, tensor=2, stages=2, zero=2)], ids=str
)


def add_up_narrow(model: nn.Module, _: int) -> None:
    """Round gradients of linear layers to bf16, each time that they were added to."""
    for layer in model.modules():
        for parameter in layer.parameters() if isinstance(layer, nn.Linear) else ():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16().float()


def test_one_rank_in_bf16_is_torchs_autocast_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's kernels; with attention's gradient in fp32, where that is faster, near it."""
    expected, _ = micro_batch_loop(BF16, STEPS)
    assert virtual_run(BF16, Layout(), STEPS).losses == pytest.approx(expected, rel=NOISE)
    monkeypatch.setattr(products, "rule", lambda: None)
    found = run_plan(BF16, compiled(BF16, Layout()).plan, STEPS).losses
    assert found == pytest.approx(expected, rel=1e-4)


@ANY_LAYOUT
def test_layouts_in_bf16_train_as_one_rank_in_bf16_and_near_fp32(layout: Layout) -> None:
    found = virtual_run(BF16, layout, STEPS).losses
    assert found == pytest.approx(virtual_run(BF16, Layout(), STEPS).losses, rel=NOISE)
    assert found == pytest.approx(plain_loop(FP32, 0.0, STEPS).losses, rel=NOISE)
    assert found != virtual_run(FP32, layout, STEPS).losses


@ANY_LAYOUT
def test_weights_states_and_accumulators_are_fp32(layout: Layout) -> None:
    graph = compiled(BF16, layout).plan.graph
    assert {graph.tensors[v.tensor].dtype for v in graph.variables} == {torch.float32}
    sums = [op.makes[0] for op in graph.ops if op.target == "flow.accumulate"]
    assert {graph.tensors[name].dtype for name in sums} == {torch.float32}
    assert {w.dtype for w in virtual_run(BF16, layout, STEPS).weights.values()} == {torch.float32}


NARROW = replace(BF16, narrow_residual=True)


def test_a_narrow_residual_trains_near_a_wide_one_and_waits_for_backward_in_bf16() -> None:
    layout = Layout(stages=2)
    found = virtual_run(NARROW, layout, STEPS).losses
    wide = virtual_run(BF16, layout, STEPS).losses
    assert found == pytest.approx(wide, rel=NOISE)
    assert found != wide
    one, other = (compiled(each, layout).rehearsal for each in (NARROW, BF16))
    assert sum(one.bound_bytes) < sum(other.bound_bytes)


def test_without_autocast_nothing_is_narrow() -> None:
    plans = (compiled(replace(FP32, narrow_residual=n), Layout()).plan for n in (True, False))
    assert len(set(map(str, plans))) == 1


def reduced(training: Training, layout: Layout) -> set[torch.dtype]:
    """Dtypes in which the data ranks sum gradients."""
    plan = compiled(training, layout).plan
    return {
        move.dtype
        for actor in plan.actors
        if isinstance(actor.work, BoxWork) and actor.phase != FORWARD
        for step, move in zip(actor.work.steps, actor.work.moves, strict=True)
        if step.axis == 0 and step.kind in ("all_reduce", "exchange", "reduce_scatter")
    }


# wide enough that bytes count: below, gradients are added up in fp32 and reduced in the update
ONE_MICRO_BATCH = replace(gpt(blocks=1, width=128), autocast=torch.bfloat16, micro_batches=1)
SUMMED = [
    (ONE_MICRO_BATCH, Layout(data=2)),
    (ONE_MICRO_BATCH, Layout(data=2, tensor=2)),
    (BF16, Layout(data=2, zero=2)),
    (BF16, Layout(data=2, zero=3)),
    (BF16, Layout(data=2, tensor=2, stages=2, zero=2)),
]


@pytest.mark.parametrize(
    ("training", "layout"), SUMMED, ids=[f"{t.micro_batches} {layout}" for t, layout in SUMMED]
)
def test_gradients_are_summed_over_ranks_in_fp32_where_asked_for(
    training: Training, layout: Layout
) -> None:
    """As torch's DistributedDataParallel has it under autocast; else as FSDP: in bf16."""
    wide = replace(layout, reduce_in_fp32=True)
    assert torch.bfloat16 in reduced(training, layout)
    assert reduced(training, wide) == {torch.float32}
    alone, found = (virtual_run(training, each, STEPS).losses for each in (Layout(), wide))
    assert found == pytest.approx(alone, rel=NOISE)
    assert found != virtual_run(training, layout, STEPS).losses


def test_gradients_are_added_up_as_they_were_computed_where_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Megatron-LM has it in fp16; one rank with torch's kernels is a loop that does so.

    Three losses tell: later a sum at the edge of a rounding may fall to its other side.
    """
    monkeypatch.setattr(products, "rule", lambda: None)
    many = replace(gpt(blocks=1, width=16), autocast=torch.bfloat16, micro_batches=4)
    wide, found = (
        run_plan(many, compiled(many, layout).plan, 3).losses
        for layout in (Layout(), Layout(accumulate_in_fp32=False))
    )
    assert wide == pytest.approx(micro_batch_loop(many, 3)[0], rel=1e-6)
    narrow, _ = micro_batch_loop(many, 3, after=add_up_narrow)
    assert found == pytest.approx(narrow, rel=1e-6)
    assert found != pytest.approx(wide, rel=1e-6)


LINEAR = ("blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "head.weight")


@ANY_LAYOUT
def test_gradients_added_up_in_bf16_are_reduced_in_it_and_hold_less(layout: Layout) -> None:
    narrow = replace(layout, accumulate_in_fp32=False)
    graph = compiled(BF16, narrow).plan.graph
    assert {graph.tensors[f"grad/{name}"].dtype for name in LINEAR} == {torch.bfloat16}
    if layout.data > 1:
        assert torch.bfloat16 in reduced(BF16, narrow)
    found = virtual_run(BF16, narrow, STEPS)
    alone = virtual_run(BF16, Layout(accumulate_in_fp32=False), STEPS).losses
    assert found.losses == pytest.approx(alone, rel=NOISE)
    assert {w.dtype for w in found.weights.values()} == {torch.float32}
    less, more = (compiled(BF16, each).rehearsal.bound_bytes for each in (narrow, layout))
    assert sum(less) < sum(more)


def test_products_are_bf16_in_training_and_evaluation() -> None:
    for rehearsed in (compiled(BF16, Layout(data=2)), compiled_evaluation(BF16, Layout(data=2))):
        graph = rehearsed.plan.graph
        products = [op.makes[0] for op in graph.ops if op.target == "aten.mm.default"]
        assert {graph.tensors[name].dtype for name in products} == {torch.bfloat16}


def test_clipped_layouts_agree() -> None:
    alone = virtual_run(BF16, Layout(clip_norm=CLIP), STEPS).losses
    found = virtual_run(BF16, Layout(data=2, tensor=2, clip_norm=CLIP), STEPS).losses
    assert found == pytest.approx(alone, rel=NOISE)


def gathered_bytes(training: Training, layout: Layout) -> int:
    """That the virtual cluster moved to gather weights."""
    run = virtual_run(training, layout, STEPS)
    names = {v.name for v in run.plan.graph.variables}
    casts = run.plan.graph.of_weights
    return sum(
        count
        for actor, count in run.sent_bytes.items()
        if isinstance(work := run.plan.actors[actor].work, BoxWork)
        and all(move.read in names | casts for move in work.moves)
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathers_of_weights_move_half_the_bytes_where_they_are_cast(stage: int) -> None:
    """The embeddings are read in fp32; biases and norms are too small for ZeRO."""
    layout = Layout(data=2, zero=stage)
    graph = compiled(FP32, layout).plan.graph
    embeddings = sum(
        graph.tensors[v.tensor].num_bytes for v in graph.variables if v.name.startswith("embed.")
    )
    # one rank's half to the other, both ways: as many bytes as the weights have, each step, under
    # ZeRO 3 each micro-batch, where backward reads no embedding
    rate = FP32.micro_batches if stage == 3 else 1
    whole = STEPS * rate * embeddings
    before, after = gathered_bytes(FP32, layout), gathered_bytes(BF16, layout)
    assert after - whole == (before - whole) / 2 > 0
