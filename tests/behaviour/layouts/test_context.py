"""Context parallelism: an axis divides the length of samples, through the whole model.  Attention
gathers keys and values, or turns heads for tokens by all-to-alls; nothing else moves activations.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch.nn.functional as F
from torch import Tensor

from flowrun.engine.actors.plan import Plan
from flowrun.engine.boxing.boxing import step_bytes
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, FORWARD, UPDATE, Op
from flowrun.engine.strategy import Recompute
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama
from support.layouts.grids import (
    Layout,
    assert_as_plain_torch,
    assert_evaluates_as_plain_torch,
    compiled,
    live_bytes,
    virtual_run,
)
from support.layouts.plain_loop import MOMENTUM, Batch, Training, gpt, seeded, token_batches
from support.nets.packed import GPT_PACKED, LLAMA_PACKED
from support.plans.small_recipes import RECIPES, small_job

BLOCKS, WIDTH, STEPS = 2, 16, 3
PLAIN = gpt(BLOCKS, WIDTH)
BIASED = replace(
    PLAIN, model=partial(seeded, partial(GPT, 64, 16, 1, 4, WIDTH, bias=True)), optimizer=MOMENTUM
)
GROUPED = replace(PLAIN, model=partial(seeded, partial(Llama, 64, 1, 4, 2, WIDTH, 32)), pins=())


def each_alone(output: Tensor, batch: Batch) -> Tensor:
    """A loss of each token, counted by hand."""
    targets = batch["targets"].flatten()
    return (F.cross_entropy(output.flatten(0, 1), targets, reduction="none") * (targets % 3)).mean()


ALONE = replace(PLAIN, loss=each_alone)
HOW = ("heads", "gather", "ring", "balanced_gather", "balanced_ring")
WAYS = {how: Layout(context=2, attention=how) for how in HOW}
HEADS, GATHER, RING, EVEN_GATHER, EVEN_RING = WAYS.values()
CASES = [
    *((PLAIN, layout) for layout in (HEADS, GATHER, Layout(context=4), Layout(context=3))),
    *((PLAIN, replace(RING, **more)) for more in ({}, {"context": 4}, {"data": 2, "zero": 3})),
    (PLAIN, replace(RING, tensor=2, stages=2)),
    *((training, RING) for training in (BIASED, GROUPED)),
    (PLAIN, Layout(context=3, attention="gather")),
    (PLAIN, Layout(data=2, context=2, zero=3)),
    (PLAIN, Layout(context=2, tensor=2, attention="gather")),
    (PLAIN, Layout(context=2, stages=2)),
    *((BIASED, layout) for layout in (HEADS, GATHER)),
    *((GROUPED, layout) for layout in (HEADS, GATHER)),
    *((GPT_PACKED, layout) for layout in (*WAYS.values(), replace(GATHER, context=3))),
    *((GPT_PACKED, replace(RING, **more)) for more in ({"context": 4}, {"data": 2, "zero": 3})),
    *((LLAMA_PACKED, layout) for layout in (replace(GATHER, tensor=2), RING)),
    (ALONE, Layout(context=2)),
    *((PLAIN, layout) for layout in (EVEN_GATHER, EVEN_RING, replace(EVEN_GATHER, context=4))),
    *((PLAIN, replace(EVEN_RING, **more)) for more in ({"context": 4}, {"data": 2, "zero": 3})),
    *((GPT_PACKED, replace(layout, context=4)) for layout in (EVEN_GATHER, EVEN_RING)),
    *((GROUPED, replace(layout, tensor=2)) for layout in (EVEN_GATHER, EVEN_RING)),
    (PLAIN, replace(EVEN_RING, stages=2, recompute=Recompute(("blocks.*",)))),
]
NAMES = {PLAIN: "gpt", BIASED: "biased", GROUPED: "grouped", ALONE: "alone"}
NAMES |= {GPT_PACKED: "packed", LLAMA_PACKED: "packed llama"}
OF_BYTES = pytest.mark.parametrize(
    ("training", "parts"),
    [(PLAIN, 2), (PLAIN, 4), (GPT_PACKED, 2), (GPT_PACKED, 4)],
    ids=["2", "4", "packed 2", "packed 4"],
)


@pytest.mark.parametrize(("training", "layout"), CASES, ids=[f"{NAMES[t]} {n}" for t, n in CASES])
def test_divided_lengths_train_as_plain_torch(training: Training, layout: Layout) -> None:
    assert_as_plain_torch(training, virtual_run(training, layout, STEPS))


def balanced(layout: Layout) -> Layout:
    return replace(layout, attention=f"balanced_{layout.attention}")


@pytest.mark.parametrize("layout", WAYS.values(), ids=WAYS)
def test_divided_lengths_are_evaluated_as_plain_torch(layout: Layout) -> None:
    assert_evaluates_as_plain_torch(PLAIN, layout)


def activation_boxings(plan: Plan) -> list[Op]:
    """Boxings that move at least a quarter of an activation with every micro-batch."""
    tensors, graph = plan.graph.tensors, plan.graph
    (embedded,) = (op for op in graph.ops if op.name == "embedding")
    size = tensors[embedded.makes[0]].num_elements
    return [
        op
        for op in graph.ops
        if op.target == "flow.box"
        and op.args[1].moves
        and op.phase != UPDATE
        and tensors[op.makes[0]].num_elements >= size // 4
    ]


def activation(plan: Plan) -> int:
    (embedded,) = (op for op in plan.graph.ops if op.name == "embedding")
    return plan.graph.tensors[embedded.makes[0]].num_bytes


def moved(plan: Plan, phase: str) -> float:
    """Bytes that all ranks send in a phase, with one micro-batch."""
    tensors, parts = plan.graph.tensors, (len(plan.placements[0].ranks),)
    return sum(
        step_bytes(op.args[1], op.in_sbp[0], parts, tensors[op.makes[0]].num_bytes)
        for op in activation_boxings(plan)
        if op.phase == phase
    )


@OF_BYTES
def test_heads_for_tokens_are_all_to_alls_of_four_activations(
    training: Training, parts: int
) -> None:
    plan = compiled(training, replace(HEADS, context=parts)).plan
    assert {op.args[1].kind for op in activation_boxings(plan)} == {"all_to_all"}
    # queries, keys, values and the output; backward their gradients
    each = 4 * BLOCKS * activation(plan) * (parts - 1) / parts
    assert moved(plan, FORWARD) == each
    assert moved(plan, BACKWARD) == each


@OF_BYTES
def test_gathered_keys_are_two_gathers_and_two_reduce_scatters(
    training: Training, parts: int
) -> None:
    """Backward gathers them again, rather than forward holding what it has gathered."""
    plan = compiled(training, replace(GATHER, context=parts)).plan
    kinds = Counter((op.phase, op.args[1].kind) for op in activation_boxings(plan))
    gathers = {(FORWARD, "all_gather"), (BACKWARD, "all_gather")}
    assert kinds.keys() == {*gathers, (BACKWARD, "reduce_scatter")}
    each = 2 * BLOCKS * activation(plan) * (parts - 1)
    assert moved(plan, FORWARD) == each
    assert moved(plan, BACKWARD) == 2 * each


@OF_BYTES
def test_around_a_ring_keys_turn_and_bring_their_gradients_home(
    training: Training, parts: int
) -> None:
    plan = compiled(training, replace(RING, context=parts)).plan
    assert {op.args[1].kind for op in activation_boxings(plan)} == {"turn"}
    around = 2 * BLOCKS * activation(plan)  # keys and values, once a turn
    assert moved(plan, FORWARD) == around * (parts - 1)
    assert moved(plan, BACKWARD) == around * (parts - 1 + parts)


@OF_BYTES
@pytest.mark.parametrize("way", [GATHER, RING], ids=["gather", "ring"])
def test_for_equal_work_halves_of_queries_change_ranks_and_come_back(
    training: Training, parts: int, way: Layout
) -> None:
    """On the way into attention, and what it makes on the way out; keys too, if they turn."""
    plain = replace(way, context=parts)
    even, uneven = (compiled(training, each).plan for each in (balanced(plain), plain))
    # queries and the output; backward its gradient and that of queries, and the output, which is
    # held as others read it; each half a tensor
    moves = (1 if way is GATHER else 2) * BLOCKS * activation(even)
    again = BLOCKS * activation(even) / 2
    assert {op.args[1].kind for op in activation_boxings(even)} >= {"swap"}
    assert moved(even, FORWARD) == moved(uneven, FORWARD) + moves
    assert moved(even, BACKWARD) == moved(uneven, BACKWARD) + moves + again


def test_auto_takes_what_is_foreseen_as_fastest() -> None:
    seconds = {way: compiled(PLAIN, each).rehearsal.step_s for way, each in WAYS.items()}
    chosen = compiled(PLAIN, Layout(context=2))
    assert chosen.rehearsal.step_s == min(seconds.values())
    (note,) = (note for note in chosen.plan.notes if "lengths" in note)
    assert f"divided: {min(seconds, key=seconds.__getitem__)};" in note


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("parts", "share"), [(2, 0.6), (4, 0.35)])
def test_memory_falls_with_the_ranks(parts: int, share: float, way: str) -> None:
    long = replace(
        PLAIN,
        model=partial(seeded, partial(GPT, 64, 256, 4, 4, WIDTH)),
        batches=token_batches(1, 4, length=256),
        micro_batches=1,
    )
    one = compiled(long, Layout())
    divided = compiled(long, replace(WAYS[way], context=parts))
    assert max(divided.rehearsal.peak_bytes) <= share * max(one.rehearsal.peak_bytes)
    if parts == 2:  # more ranks, which share a process here, are not at their peaks at once
        (each,) = divided.rehearsal.peak_bytes
        assert live_bytes(long, divided.plan, 1) == pytest.approx(2 * each, rel=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_planned_on_gpus(way: str) -> None:
    """Attention has a speed of its own there, and one order of launches is proved."""
    gpt_long = RECIPES[0].with_name("gpt_long.yaml")
    job = small_job(gpt_long, "hardware=h100", f"engine.long_attention={way}")
    assert job.training.plan.one_order


def test_more_ranks_than_heads_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="fewer heads than ranks"):
        compiled(PLAIN, replace(HEADS, context=8))
    with pytest.raises(RecipeError, match="do not divide the length"):
        compiled(GPT_PACKED, replace(RING, context=5))
    with pytest.raises(RecipeError, match="halves of its ranks do not divide the length"):
        compiled(PLAIN, replace(EVEN_GATHER, context=3))


@pytest.mark.parametrize("layout", WAYS.values(), ids=WAYS)
def test_documents_travel_with_no_keys(layout: Layout) -> None:
    """All ranks read the lengths of documents; what is sent is what is foreseen."""
    run = virtual_run(GPT_PACKED, layout, STEPS)
    boxed = {op.inputs[0] for op in run.plan.graph.ops if op.target == "flow.box"}
    assert not any("documents" in name for name in boxed)
    foreseen = compiled(GPT_PACKED, layout).rehearsal.sent_bytes
    assert sum(run.sent_bytes.values()) == foreseen * STEPS
