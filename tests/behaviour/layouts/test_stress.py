"""120 random plans, with acts and messages in random order, all end with the same numbers.

Thirty random layouts are compiled; each runs four times, every time with other register counts and
other axes that block (the rehearsal finds another order of collectives) and another order of
messages.  Within a layout the results are the same to the last bit, for sums are taken in order of
micro-batches and of ranks.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.graph import COUNT
from flowrun.engine.rehearsal.rehearsal import rehearse
from support.checks.thorough import few
from support.layouts.grids import Layout, assert_as_plain_torch, compiled, run_plan
from support.layouts.plain_loop import Training, gpt, mlp

PLANS, ORDERS, STEPS = 30, 4, 2
TRAININGS = [
    *(mlp(micro_batches=m) for m in (1, 2, 4)),
    *(gpt(blocks=1, width=16, samples=8, micro_batches=m) for m in (2, 4)),
]
IN_FLIGHT = (1, 2, 3, "1f1b", "gpipe", "zero_bubble", "auto")
V_SHAPES = ("v_zero_bubble", "v_half", "v_min")  # of two chunks
GRIDS = (*((),) * 5, ((1, 2), (2, 2)), ((2, 1), (1, 2)), ((2, 2), (1, 1)))


def random_case(choose: random.Random) -> tuple[Training, Layout]:
    """What is trained, on at most 8 ranks in 1 or 2 stages."""
    grids = choose.choice(GRIDS)
    data, tensor, stages = (1 if grids else choose.choice((1, 2)) for _ in range(3))
    chunks = choose.choice((1, 1, 2)) if stages > 1 or grids else 1
    shared = choose.choice((True, True, False))
    schedules = V_SHAPES if chunks == 2 and choose.random() < 0.6 else IN_FLIGHT
    return choose.choice(TRAININGS), Layout(
        data,
        tensor,
        stages,
        chunks,
        zero=choose.choice((0, 1, 2, 3, 3)) if data > 1 else 0,
        clip_norm=choose.choice((0.0, 0.1)),
        in_flight=choose.choice(schedules),
        register_slots=choose.choice((1, 2, 3)),
        grids=grids,
        shared=shared,
    )


def with_random_registers(plan: Plan, choose: random.Random) -> Plan:
    """1 to 3 slots for each register that changes with every micro-batch, a whole step more where
    it is read ahead to be counted; some axes block.
    """
    counted = {
        r.producer for r in plan.registers if any(plan.actors[k].phase == COUNT for k in r.readers)
    }
    registers = tuple(
        r
        if r.per_step
        else replace(r, slots=choose.randint(1, 3) + plan.micro_batches * (r.producer in counted))
        for r in plan.registers
    )
    blocking = tuple(axis for axis in range(len(plan.axes)) if choose.random() < 0.5)
    changed = replace(plan, registers=registers, order=(), blocking=blocking)
    return replace(changed, order=rehearse(changed).order)


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans_in_random_order_end_with_the_same_numbers(seed: int) -> None:
    choose = random.Random(f"seed {seed}")
    training, layout = random_case(choose)
    plan = compiled(training, layout).plan
    first = run_plan(training, plan, STEPS, order_seed=None)
    assert_as_plain_torch(training, first, layout.clip_norm)
    for order_seed in range(ORDERS):
        changed = with_random_registers(plan, choose)
        found = run_plan(training, changed, STEPS, order_seed)
        assert found.losses == first.losses
        assert all(torch.equal(found.weights[name], first.weights[name]) for name in first.weights)
        assert found.sent_bytes == first.sent_bytes


def test_the_random_plans_are_unlike() -> None:
    cases = [random_case(random.Random(f"seed {seed}")) for seed in range(PLANS)]
    layouts = {layout for _, layout in cases}
    assert len(set(cases)) >= PLANS - 2
    assert {training for training, _ in cases} == set(TRAININGS)
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.in_flight for layout in layouts} == {*IN_FLIGHT, *V_SHAPES}
    assert {layout.grids for layout in layouts} == set(GRIDS)
    assert {layout.zero for layout in layouts if layout.shared} == {0, 1, 2, 3}
    assert any(layout.zero for layout in layouts if not layout.shared)


# context x tensor x stages x (data, ZeRO), each by every way of attention
DIVIDED = [
    Layout(data, tensor, stages, zero=zero, context=2, attention=way, clip_norm=0.1)
    for way, tensor, stages, (data, zero) in itertools.product(
        ("heads", "gather", "ring", "balanced_gather", "balanced_ring"),
        (1, 2),
        (1, 2),
        ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)),
    )
]


@pytest.mark.parametrize("layout", few(DIVIDED, DIVIDED[::11]), ids=str)
def test_divided_lengths_agree_beside_every_other_axis(layout: Layout) -> None:
    found = run_plan(TRAININGS[-1], compiled(TRAININGS[-1], layout).plan, STEPS, order_seed=0)
    assert_as_plain_torch(TRAININGS[-1], found, layout.clip_norm)
