"""How a head and its cross entropy are computed changes no number: every layout trains as a plain
loop, with classes padded, and in chunks of rows, which hold no logits whole.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.compile import Rehearsed, plan_evaluation, plan_training
from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.sbp import S
from flowrun.engine.ops.math.matmul import multiply
from flowrun.engine.ops.nn import chunked_head
from flowrun.engine.runtime.kernels.cpu import row_chunks
from flowrun.engine.strategy import Pin
from flowrun.models.gpt import GPT
from flowrun.models.losses import cross_entropy
from support.layouts.grids import (
    FIVE,
    Layout,
    assert_as_plain_torch,
    captured,
    captured_evaluation,
    live_bytes,
    run_plan,
    strategy,
)
from support.layouts.plain_loop import (
    CONTEXT,
    STEPS,
    Batch,
    Training,
    gpt,
    micro_batch_loop,
    seeded,
    sgd,
    token_batches,
)

CLASSES, WIDTH, SAMPLES, CHUNKS = 250, 16, 16, 3


def model(tied: bool = False, bias: bool = False) -> nn.Module:
    made = GPT(CLASSES, CONTEXT, 1, 4, WIDTH, tied=tied)
    if bias:
        made.head = nn.Linear(WIDTH, CLASSES)
    return made


def odd(**how: bool) -> Training:
    """A tiny GPT of 250 classes, 125 on each of two ranks; a third of the targets is ignored."""
    make = partial(seeded, partial(model, **how))
    batches = token_batches(STEPS, SAMPLES, CLASSES)
    for batch in batches:
        batch["targets"][batch["targets"] % 3 == 0] = -100
    return replace(gpt(1, WIDTH), model=make, batches=batches)


ODD, BIASED = odd(), odd(bias=True)
TIED = replace(odd(tied=True), pins=tuple(p for p in ODD.pins if p.pattern != "head.weight"))
LENGTHS = (
    *(Layout(context=2, attention=how) for how in ("heads", "ring")),
    *(Layout(context=3), Layout(context=2, tensor=2), Layout(context=2, stages=2)),
)
CASES = [
    *((ODD, layout) for layout in (*FIVE, Layout(data=2, tensor=2, zero=3))),
    *((TIED, layout) for layout in FIVE),
    *((BIASED, layout) for layout in FIVE[:3]),
]
NAMES = {ODD: "own", TIED: "tied", BIASED: "biased"}


@lru_cache
def planned(training: Training, layout: Layout, chunks: int = 1, pads: bool = True) -> Rehearsed:
    asked = replace(strategy(training, layout), pads_classes=pads, loss_chunks=chunks)
    return plan_training(captured(training), asked)


def ops(plan: Plan, target: str) -> list[Op]:
    works = (actor.work for actor in plan.actors if isinstance(actor.work, RegionWork))
    return [op for work in works for op in work.ops if op.target == target]


def assert_no_whole_logits(plan: Plan) -> None:
    rows = CONTEXT * SAMPLES // 4
    assert max(tensor.num_elements for tensor in plan.tensors.values()) < rows * CLASSES


@pytest.mark.parametrize(("training", "layout"), CASES, ids=[f"{NAMES[t]} {n}" for t, n in CASES])
def test_padded_classes_train_as_a_plain_loop(training: Training, layout: Layout) -> None:
    plan = planned(training, layout).plan
    assert_as_plain_torch(training, run_plan(training, plan, STEPS))
    assert len(ops(plan, "flow.product")) == 3
    (note,) = (note for note in plan.notes if "pad_classes" in note)
    assert note.startswith("head: its products see a multiple of 64 classes, zeros after the 250")


CHUNKED = [*CASES, *((ODD, layout) for layout in LENGTHS), (TIED, LENGTHS[0]), (BIASED, LENGTHS[0])]


@pytest.mark.parametrize(
    ("training", "layout"), CHUNKED, ids=[f"{NAMES[t]} {n}" for t, n in CHUNKED]
)
def test_chunks_of_rows_train_as_a_plain_loop(training: Training, layout: Layout) -> None:
    plan = planned(training, layout, CHUNKS, training is TIED).plan
    assert_no_whole_logits(plan)
    assert_as_plain_torch(training, run_plan(training, plan, STEPS))
    assert any("3 chunks of rows (engine.loss_chunks)" in note for note in plan.notes)


@pytest.mark.parametrize("layout", LENGTHS, ids=str)
def test_each_rank_has_its_own_tokens_in_chunks(layout: Layout) -> None:
    """Its losses are those of whole logits and of one rank, and no hidden state is gathered."""
    plan = planned(ODD, layout, CHUNKS, False).plan
    runs = (run_plan(ODD, planned(ODD, alike).plan, 2) for alike in (layout, Layout()))
    found = run_plan(ODD, plan, 2).losses
    assert all(found == pytest.approx(run.losses, rel=1e-6) for run in runs)
    (made,) = ops(plan, "flow.head_gradient")
    assert made.in_sbp[0][0] == made.out_sbp[0][0] == S(1)


class Narrow(nn.Linear):
    """A head in bf16; all else is fp64, so that layouts round alike."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.bfloat16(), self.weight.bfloat16())


class Rounded(torch.autograd.Function):
    """Its product and gradients as ranks round them, which have some rows or some classes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), w.bfloat16())
        ctx.layout = layout
        return x.bfloat16() @ w.bfloat16().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, w), layout = grads, ctx.saved_tensors, ctx.layout
        classes = zip(grad.chunk(layout.tensor, 1), w.chunk(layout.tensor), strict=True)
        of_x, *more = (g @ part for g, part in classes)
        of_w = torch.zeros_like(w, dtype=torch.float64)
        for g, rows in zip(grad.chunk(layout.data), x.chunk(layout.data), strict=True):
            chunks = zip(g.tensor_split(CHUNKS), rows.tensor_split(CHUNKS), strict=True)
            of_w += torch.stack([(a.t() @ b).float() for a, b in chunks]).sum(0).bfloat16()
        return sum(more, of_x).double(), of_w, None


class PlainNarrow(Narrow):
    layout = Layout()

    def forward(self, input: Tensor) -> Tensor:
        rows = Rounded.apply(input.flatten(0, -2), self.weight, self.layout)
        return rows.unflatten(0, input.shape[:-1])  # type: ignore[no-untyped-call, no-any-return]


def narrow(layout: Layout | None = None) -> Training:
    """layout: of the ranks that the plain loop rounds as.  Not AdamW, which divides a gradient by
    its own size: one of 250,000 numbers on an edge between two of bf16 would show.
    """

    def made() -> nn.Module:
        whole = model().double()
        whole.head.__class__ = PlainNarrow if layout else Narrow
        whole.head.layout = layout
        return whole

    batches = token_batches(STEPS, SAMPLES, CLASSES)
    return replace(ODD, model=partial(seeded, made), batches=batches, optimizer=sgd(0.01, 0.9))


@pytest.mark.parametrize("layout", FIVE, ids=str)
def test_chunks_in_bf16_train_as_a_plain_loop_that_rounds_alike(layout: Layout) -> None:
    training = narrow()
    found = run_plan(training, planned(training, layout, CHUNKS).plan, STEPS).losses
    assert found == pytest.approx(micro_batch_loop(narrow(layout), STEPS)[0], rel=1e-5)


def test_a_chunk_left_out_and_statistics_that_are_off_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks, statistics = chunked_head._chunks, chunked_head.head_statistics

    def all_but_one(how: Any, *tensors: Tensor) -> list[Any]:
        return list(chunks(how, *tensors))[: None if len(tensors) == 2 else -1]

    def off(head: Any, how: Any, start: int) -> tuple[Tensor, ...]:
        own, lse = statistics(head, how, start)
        return own, lse + 1e-3 * (start > 0)

    for name, fault in (("_chunks", all_but_one), ("head_statistics", off)):
        with monkeypatch.context() as planted, pytest.raises(AssertionError):
            planted.setattr(chunked_head, name, fault)
            run = run_plan(ODD, planned(ODD, Layout(tensor=2), CHUNKS, False).plan, 2)
            assert_as_plain_torch(ODD, run)


def test_exponentials_and_sums_of_chunks_are_foreseen_as_those_of_whole_logits() -> None:
    slow = dict.fromkeys(("aten.logsumexp.default", "flow.cross_entropy_backward"), 1e5)
    asked = replace(strategy(ODD, Layout()), hardware=Hardware(elements_per_s=slow))
    plans = [plan_training(captured(ODD), replace(asked, loss_chunks=n)) for n in (1, CHUNKS)]
    whole, chunked = (made.rehearsal.step_s for made in plans)
    assert whole < chunked < 1.05 * whole


@pytest.mark.parametrize("parts", [1, 2])
def test_memory_falls_by_the_logits_as_foreseen(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 2 * row_chunks.CHUNK_BYTES)  # two threads
    many = partial(seeded, partial(GPT, 4000, CONTEXT, 1, 4, WIDTH))
    training = replace(gpt(1, WIDTH, 64, 1), model=many, batches=token_batches(2, 64, 4000))
    layout = Layout(context=parts, attention="heads")
    whole, chunked = (planned(training, layout, n, False) for n in (1, 8))
    ((before,), (after,)) = (found.rehearsal.peak_bytes for found in (whole, chunked))
    ins = (64, CONTEXT // parts, WIDTH), (4000, WIDTH)
    (op,) = ops(chunked.plan, chunked_head.GRADIENT)
    held = chunked_head._held_bytes(op, ins, 4)  # of one rank at a time: they share a process here
    live = live_bytes(training, chunked.plan, steps=2) + (parts - 1) * held
    assert after == pytest.approx(live / parts, rel=0.1)
    if parts == 1:
        assert before == pytest.approx(live_bytes(training, whole.plan, steps=2), rel=0.02)
    assert before - after > 0.7 * 64 * CONTEXT * 4000 * 4 / parts


# ---- what needs whole logits is refused ----------------------------------------------------------


class Capped(GPT):
    def forward(self, tokens_BT: Tensor, *rest: Tensor) -> Tensor:
        return super().forward(tokens_BT, *rest).tanh()


def z_loss(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch) + 1e-3 * logits.logsumexp(-1).square().mean()


CAPPED = partial(seeded, partial(Capped, CLASSES, CONTEXT, 1, 4, WIDTH))
WITH_PIN = (*ODD.pins, Pin("head", "out", "tensor", S(2)))
REFUSED = {
    "smoothed": (replace(ODD, loss=partial(cross_entropy, label_smoothing=0.1)), "must be a cross"),
    "z-loss": (replace(ODD, loss=z_loss), "of loss reads the logits of head"),
    "capped": (replace(ODD, model=CAPPED), "tanh is not what an nn.Linear makes"),
    "pinned": (replace(ODD, pins=WITH_PIN), "flow.pin of head reads the logits of head"),
}


@pytest.mark.parametrize(("training", "why"), list(REFUSED.values()), ids=list(REFUSED))
def test_another_use_of_logits_is_refused(training: Training, why: str) -> None:
    with pytest.raises(RecipeError, match=why) as refused:
        planned(training, Layout(tensor=2), CHUNKS)
    assert refused.value.where == "engine.loss_chunks"


def test_more_chunks_than_rows_are_refused() -> None:
    with pytest.raises(RecipeError, match="64 rows of logits are fewer than 65 chunks"):
        planned(ODD, Layout(), 65)


def test_evaluation_runs_in_chunks_too_unless_a_metric_reads_logits() -> None:
    asked, plan = strategy(ODD, Layout()), planned(ODD, Layout(), CHUNKS).plan
    asked, bare = replace(asked, loss_chunks=CHUNKS), replace(ODD, metrics={})
    assert_no_whole_logits(plan_evaluation(captured_evaluation(bare), asked, plan).plan)
    with pytest.raises(RecipeError, match=r"aten.argmax.default of loss reads the logits"):
        plan_evaluation(captured_evaluation(ODD), asked, plan)


def test_rows_of_logits_are_aligned() -> None:
    x, w = torch.randn(3, 4), torch.randn(7, 4)
    logits = multiply(x, w, None, "mk,ck->mc")
    assert (logits.shape, logits.stride()) == ((3, 7), (64, 1))
    assert torch.allclose(logits, x @ w.t())


def test_aligned_classes_are_left_as_they_are() -> None:
    assert ops(planned(gpt(1, WIDTH), Layout()).plan, "flow.product") == []
