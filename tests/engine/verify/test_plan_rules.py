from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from flowrun.engine.actors.plan import BOX, REGION, SEND, Actor, Plan, Register
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.compile import plan_training
from flowrun.engine.errors import PlanError
from flowrun.engine.ir.graph import BACKWARD
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, P
from flowrun.engine.strategy import Strategy
from flowrun.engine.verify.plan_rules import validate
from support.plans.graph_text import SGD, two_layers

PLACEMENTS = tuple(Placement((("data", 2),), ranks) for ranks in ((0, 1), (2, 3)))


@cache
def planned() -> Plan:
    """Two layers on two stages of two ranks."""
    stages = (("a", "act"), ("b",))
    strategy = Strategy(("data",), PLACEMENTS, stage_modules=stages, optimizer=SGD, micro_batches=2)
    return plan_training(two_layers(), strategy).plan


def with_actor(plan: Plan, actor: Actor, **fields: Any) -> Plan:
    """The plan with one actor changed; `work` may be given as a dict of its fields."""
    work = fields.pop("work", {})
    new = replace(actor, work=replace(actor.work, **work), **fields)
    return replace(plan, actors=tuple(new if a.id == actor.id else a for a in plan.actors))


def with_register(plan: Plan, register: Register, **fields: Any) -> Plan:
    new = replace(register, **fields)
    return replace(plan, registers=tuple(new if r.id == new.id else r for r in plan.registers))


def first(plan: Plan, kind: str, phase: str = "") -> Actor:
    """The first actor of a kind, and of a phase where one is given."""
    return next(a for a in plan.actors if a.kind == kind and phase in ("", a.phase))


def stash(plan: Plan) -> Register:
    """The first register that waits for backward."""
    return next(r for r in plan.registers if r.stash)


def weights(plan: Plan) -> Register:
    return next(r for r in plan.registers if r.initial)


def without_an_act(plan: Plan) -> Plan:
    """Rank after rank would issue one collective fewer."""
    (group, acts), *rest = plan.order
    return replace(plan, order=((group, acts[1:]), *rest))


def overwritten(plan: Plan) -> Plan:
    """A result over a tensor of another shape."""
    region = first(plan, REGION, BACKWARD)
    op = next(op for op in region.work.ops if op.inputs and len(op.makes) == 1)  # type: ignore[union-attr]
    return with_actor(plan, region, work={"overwrites": ((op.makes[0], op.inputs[0]),)})


def on_two_axes(plan: Plan) -> Plan:
    """A message for two tensors whose second step is on an axis that is not there."""
    box = first(plan, BOX)
    steps = (*box.work.steps, BoxingStep(1, P, B))  # type: ignore[union-attr]
    return with_actor(plan, box, work={"steps": steps})


def moved_from_elsewhere(plan: Plan) -> Plan:
    """A collective whose first tensor is said to lie as what it makes."""
    box = first(plan, BOX)
    move, *rest = box.work.moves  # type: ignore[union-attr]
    return with_actor(plan, box, work={"moves": (replace(move, source=move.target), *rest)})


Plant = Callable[[Plan], Plan]
FAULTS: tuple[tuple[Plant, str, str], ...] = (
    (lambda p: with_register(p, stash(p), readers=(99,)), "register ", "it names actor 99"),
    (lambda p: with_actor(p, first(p, REGION), inputs=()), "actor ", "by one end alone"),
    (lambda p: with_register(p, stash(p), slots=0), "register ", "it has 0 slots"),
    (lambda p: with_register(p, stash(p), num_bytes=1), "register ", "it has 1 bytes; its tensors"),
    (lambda p: with_register(p, weights(p), initial=0), "actor ", "it waits for itself: "),
    (lambda p: with_register(p, stash(p), tensors=("y",)), "register ", "it holds %y, which actor"),
    (lambda p: with_actor(p, first(p, SEND), work={"channel": 9}), "channel ", "1 sends and 0 rec"),
    (lambda p: with_actor(p, first(p, REGION), stage=1), "actor ", "stage 0"),
    (
        lambda p: with_actor(p, first(p, REGION), work={"ops": (), "makes": ()}),
        "op ",
        "0 actors do it",
    ),
    (moved_from_elsewhere, "actor ", "and moves as"),
    (without_an_act, "actor ", "has act 0 of it 0 times, not 1."),
    (on_two_axes, "actor ", "2 steps for 1 tensors"),
    (overwritten, "actor ", "is written over"),
)


def test_a_sound_plan_is_allowed() -> None:
    validate(planned())


@pytest.mark.parametrize(("plant", "where", "found"), FAULTS)
def test_a_planted_fault_is_refused_with_its_place_and_level(
    plant: Plant, where: str, found: str
) -> None:
    with pytest.raises(PlanError) as refused:
        validate(plant(planned()), made_by="a_pass")
    assert refused.value.where.startswith(where)
    assert found in refused.value.problem
    assert "At level order, made by a_pass. Expected: " in refused.value.problem
