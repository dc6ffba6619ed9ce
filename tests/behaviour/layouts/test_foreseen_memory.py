"""Foreseen memory is the memory that tensors take, counted on the virtual cluster of one rank.

Within 10 % is promised; what is left is small (measured: 2 %): a kernel of several torch ops, or
the order in which the bytes of one act come and go.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flowrun.engine.actors.plan import BOX, READER, REGION, SEND, Actor, BoxWork, Plan
from flowrun.engine.compile import Compilation, Rehearsed, longest_equal_step
from flowrun.engine.cost.footprint import Footprint
from flowrun.engine.cost.live import Live
from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import FORWARD
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes
from flowrun.engine.strategy import Recompute
from flowrun.launcher.model.adapters import add_adapters
from flowrun.launcher.recipe.schema import Adapters
from flowrun.models.losses import routed_cross_entropy
from flowrun.models.moe import MixtureGPT
from support.layouts.grids import Layout, compiled, example, live_bytes, strategy, task
from support.layouts.plain_loop import (
    CONTEXT,
    TINY_CONVNET,
    TINY_MLP,
    VOCABULARY,
    Training,
    gpt,
    mlp,
    seeded,
)
from support.nets.transformers_models import published, tokens

GPT = gpt(blocks=2, width=32)
MIXTRAL = published(
    *("MixtralForCausalLM", tokens), num_local_experts=4, num_experts_per_tok=2, sliding_window=None
)


def _with_adapters() -> nn.Module:
    model = GPT.model()
    add_adapters(model, Adapters(rank=2, modules=("*.qkv", "*.fc2")))
    return model


def gpt_of_experts() -> Training:
    model = partial(seeded, partial(MixtureGPT, VOCABULARY, CONTEXT, 2, 2, 32, 4, 2, None))
    return replace(GPT, model=model, inputs={"tokens_BT": "tokens"}, loss=routed_cross_entropy)


CASES = {
    "GPT": (GPT, Layout()),
    "GPT, clipped": (GPT, Layout(clip_norm=0.5)),
    "GPT, recomputed": (GPT, Layout(recompute=Recompute(("blocks.*",)))),
    "GPT, products kept": (GPT, Layout(recompute=Recompute(("blocks.*",), ("matmul",)))),
    "GPT of few samples, all of it updated at once": (gpt(1, 64, 1, 1), Layout(clip_norm=0.5)),
    "GPT, its base frozen": (replace(GPT, model=partial(seeded, _with_adapters)), Layout()),
    "MLP": (TINY_MLP, Layout()),
    "convnet": (TINY_CONVNET, Layout()),
    "experts": (gpt_of_experts(), Layout()),
    "experts with gates": (MIXTRAL.training(), Layout()),
}


@pytest.mark.parametrize(("training", "layout"), list(CASES.values()), ids=list(CASES))
def test_foreseen_bytes_are_the_bytes_of_live_tensors(training: Training, layout: Layout) -> None:
    found = compiled(training, layout)
    (foreseen,) = found.rehearsal.peak_bytes
    assert foreseen == pytest.approx(live_bytes(training, found.plan, steps=2), rel=0.1)


# ---- the bound: stashes that fill up -------------------------------------------------------------

DEEP = mlp(micro_batches=4)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(data=2), Layout(stages=2, in_flight="1f1b"), Layout(stages=2, in_flight=1)],
    ids=lambda layout: f"{layout}, {layout.in_flight}",
)
def test_where_nothing_can_wait_longer_the_bound_is_what_is_foreseen(layout: Layout) -> None:
    found = compiled(DEEP, layout).rehearsal
    assert found.bound_bytes == found.peak_bytes


def test_messages_that_come_late_fill_the_stash_up_to_the_bound() -> None:
    """Backward of the last stage waits for its gradients to leave; forward goes on."""
    found = compiled(GPT, Layout(stages=2, in_flight="gpipe"))

    def late(actor: Actor) -> float:
        return 100.0 if actor.kind == SEND and actor.phase == "backward" else 1.0

    reached = rehearse(found.plan, late).peak_bytes
    assert found.rehearsal.peak_bytes[1] < reached[1] <= found.rehearsal.bound_bytes[1]


def test_messages_that_are_read_late_fill_their_memory_up_to_the_bound() -> None:
    """What a rank has written stays until the others have read it; its pages stay for good."""
    found = compiled(GPT, Layout(data=2, shared=True))
    reached = rehearse(found.plan, lambda actor: 100.0 if actor.kind == BOX else 1.0).peak_bytes
    assert found.rehearsal.peak_bytes[0] < reached[0] <= found.rehearsal.bound_bytes[0]


def test_a_rank_ahead_of_the_others_gathers_gradients_of_few_blocks() -> None:
    """Under ZeRO backward waits for the reductions that are register_slots regions behind."""

    def late(actor: Actor) -> float:
        return 100.0 if actor.kind == BOX and actor.phase == "backward" else 1.0

    def more(blocks: int) -> int:
        found = compiled(gpt(blocks, width=32), Layout(data=2, zero=2))
        assert found.rehearsal.peak_bytes == found.rehearsal.bound_bytes
        return rehearse(found.plan, late).peak_bytes[0] - found.rehearsal.peak_bytes[0]

    assert more(blocks=4) == more(blocks=2)


def stash_slots(plan: Plan) -> set[int]:
    """Of all registers that wait for backward, but for what readers supply: targets are counted
    before the first forward of a step.
    """
    stashes = [r for r in plan.registers if r.stash and r.producer is not None]
    return {r.slots for r in stashes if plan.actors[r.producer].kind != READER}


def limited(memory_bytes: int, in_flight: int | str, communicator_bytes: int = 0) -> Rehearsed:
    """Two stages of ranks that have so much memory."""
    plan = strategy(DEEP, Layout(stages=2, in_flight=in_flight))
    hardware = Hardware(memory_bytes=memory_bytes, communicator_bytes=communicator_bytes)
    plan = replace(plan, hardware=hardware)
    return Compilation(task(DEEP), example(DEEP), plan).training


def test_a_schedule_that_may_need_more_than_there_is_is_refused() -> None:
    foreseen = compiled(DEEP, Layout(stages=2, in_flight="gpipe")).rehearsal
    needed = max(foreseen.bound_bytes)
    assert limited(needed, "gpipe").rehearsal.bound_bytes == foreseen.bound_bytes
    with pytest.raises(RecipeError, match=f"needs {needed:,} bytes and .*: 1 are missing") as error:
        limited(needed - 1, "gpipe")
    assert error.value.where == "hardware.memory_bytes"


def test_communicators_take_of_the_memory_by_name() -> None:
    needed = max(compiled(DEEP, Layout(stages=2, in_flight="gpipe")).rehearsal.bound_bytes) + 2 * 9
    counted = "18 of them for the communicators stage 0 to 1, stage 1 to 0"
    with pytest.raises(RecipeError, match=counted):
        limited(needed - 1, "gpipe", communicator_bytes=9)
    limited(needed, "gpipe", communicator_bytes=9)


def test_what_libraries_keep_is_not_for_tensors() -> None:
    assert Hardware(memory_bytes=100, reserved_bytes=30).tensor_bytes == 70
    assert Hardware(memory_bytes=0, reserved_bytes=30).tensor_bytes == 0


def test_without_a_schedule_as_much_is_in_flight_as_fits() -> None:
    bounds = {n: max(limited(0, n).rehearsal.bound_bytes) for n in (2, 4)}  # 3 are no faster
    for most in bounds:
        assert max(stash_slots(limited(bounds[most], "auto").plan)) == most


@pytest.mark.parametrize(("micro_batches", "held"), [(4, 4), (8, 4)])
def test_without_a_schedule_no_more_is_in_flight_than_pays(micro_batches: int, held: int) -> None:
    training = mlp(micro_batches=micro_batches)
    every = [compiled(training, Layout(stages=2, in_flight=n)) for n in range(1, 5)]
    limit = longest_equal_step(every[-1].rehearsal.step_s)
    assert held == 1 + [found.rehearsal.step_s <= limit for found in every].index(True)
    found = compiled(training, Layout(stages=2, in_flight="auto"))
    assert stash_slots(found.plan) == {held}


# ---- what a profile knows of kernels and messages ------------------------------------------------


def peak(hardware: Hardware, layout: Layout, blocking: tuple[str, ...] = ()) -> int:
    """Bytes of a rank; what is not told of memory stays as it is."""
    given = replace(strategy(GPT, layout), hardware=hardware, blocking=blocking)
    (found,) = Compilation(task(GPT), example(GPT), given).training.rehearsal.peak_bytes
    return found


def test_what_a_kernel_takes_for_itself_is_counted_while_it_runs() -> None:
    target = "aten.logsumexp.default"
    most = peak(Hardware(workspace={target: 1e6}), Layout())
    (op,) = (op for op in compiled(GPT, Layout()).plan.graph.ops if op.target == target)
    rows = compiled(GPT, Layout()).plan.graph.tensors[op.makes[0]].num_bytes
    assert most > 1e6 * rows
    assert most - 1e6 * rows < peak(Hardware(), Layout())


def test_messages_with_memory_of_their_own_are_there_all_the_time() -> None:
    layout = Layout(data=2)
    plan = compiled(GPT, layout).plan
    messages = {m.made for a in plan.actors if isinstance(a.work, BoxWork) for m in a.work.moves}
    num_bytes = sum(plan.graph.tensors[name].num_bytes for name in messages)
    shared, own = peak(Hardware(), layout), peak(Hardware(own_messages=True), layout)
    assert shared < own <= shared + num_bytes
    assert peak(Hardware(own_messages=True), layout, ("data",)) <= shared


# ---- the meter -----------------------------------------------------------------------------------


def test_a_view_takes_nothing_and_keeps_what_it_shows() -> None:
    with LiveBytes() as meter:
        whole = torch.zeros(100)
        part = whole[:10]
        assert meter.peak == 400
        del whole
        torch.ones(20)
        assert meter.peak == 400 + 80
        del part
        torch.ones(100)
    assert meter.peak == 400 + 80


def test_what_was_there_before_is_counted_where_it_is_named_and_only_then() -> None:
    known, other = torch.zeros(10), torch.zeros(1000)
    with LiveBytes([known]) as meter:
        other.view(10, 100)
        known.view(2, 5)
    assert meter.peak == 40


def test_what_has_gone_is_not_counted() -> None:
    with LiveBytes() as meter:
        for _ in range(5):
            torch.zeros(100)
    assert meter.peak == 400


def test_tensors_of_a_thread_that_reads_count_as_long_as_somebody_has_them() -> None:
    """Those that no op makes too, and samples that are no tensors."""

    def supply(fill: int) -> list[Any]:
        torch.zeros(50)
        return [torch.from_numpy(np.full(25, fill, np.float32)), [np.zeros(30), b"encoded"]]

    with LiveBytes() as meter, ThreadPoolExecutor(1) as pool:
        made = pool.submit(meter.read, supply, 1).result()
        assert (meter.count.live, meter.peak) == (100 + 240 + 7,) * 2
        del made
        meter.count.drop_dead()
        assert meter.count.live == 0


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4])
def test_the_bound_has_every_slot_of_every_stash(in_flight: int) -> None:
    """What the last stage may hold while it works on the first micro-batch of a step, beyond what
    it does hold: as many others as there are slots.
    """
    plan = compiled(DEEP, Layout(stages=2, in_flight=in_flight)).plan
    footprint, live = Footprint(plan, 1), Live(plan, 1)
    stashes = [r for r in plan.registers if r.stash and r.stage == 1]
    slots = {storage: r.slots for r in stashes for storage in footprint.slot(r)}
    assert in_flight in slots.values()
    others = sum((count - 1) * footprint.storage_bytes(name) for name, count in slots.items())
    forward = next(a.id for a in plan.stage_actors(1) if a.kind == REGION and a.phase == FORWARD)
    live.begin(forward, 0)
    assert live.bound - live.peak == others


# ---- messages in shared memory -------------------------------------------------------------------


def test_the_place_of_a_message_is_free_two_acts_of_compute_after_it_was_read() -> None:
    """The reader picks it up between its acts, and the writer hears of that between its own."""
    plan = compiled(GPT, Layout(data=2, shared=True)).plan
    live = Live(plan, 0)
    box, other = [actor.id for actor in plan.actors if actor.kind == BOX][:2]
    regions = [actor.id for actor in plan.actors if actor.kind == REGION][:2]

    def places() -> tuple[object, ...]:
        """Messages that a peer still reads, with the acts that they stay for."""
        return live.messages.moment()[1]  # type: ignore[return-value]

    seen = []
    for actor in (box, other, *regions):
        live.begin(actor, 0)
        live.end(actor, 0)
        seen.append(len(places()))
    assert seen == [1, 2, 2, 0]
