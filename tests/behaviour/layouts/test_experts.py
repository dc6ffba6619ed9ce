"""Experts split by S(0) of their stacked weights: tokens travel to them and back by all-to-all."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

import pytest

from flowrun.engine.actors.plan import Plan
from flowrun.engine.boxing.boxing import ALL_REDUCE, ALL_TO_ALL
from flowrun.engine.compile import Compilation
from flowrun.engine.ir.graph import BACKWARD, FORWARD, Op
from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import Pin
from flowrun.models.losses import routed_cross_entropy
from flowrun.models.metrics import accuracy
from flowrun.models.moe import MixtureGPT
from support.layouts.grids import Layout, assert_as_plain_torch, example, run_plan, strategy, task
from support.layouts.plain_loop import ADAMW, CONTEXT, VOCABULARY, Training, seeded, token_batches

STEPS, MIXTURES = 5, 1
TRAINING = Training(
    partial(seeded, partial(MixtureGPT, VOCABULARY, CONTEXT, 2, 2, 16, 4)),
    {"tokens_BT": "tokens"},
    routed_cross_entropy,
    token_batches(STEPS, 8),
    ADAMW,
    2,
    metrics={"accuracy": accuracy},
)


def pins(axis: str, dims: Mapping[str, int]) -> tuple[Pin, ...]:
    """Expert weights on an axis: name -> dim."""
    return tuple(Pin(f"blocks.*.experts.{n}", "variable", axis, S(d)) for n, d in dims.items())


ON_DATA = pins("data", {"up": 0, "down": 0})
ON_TENSOR = pins("tensor", {"up": 0, "down": 0})
INSIDE = pins("tensor", {"up": 2, "down": 1})  # each expert split by columns, then rows


@lru_cache
def plan(layout: Layout, pinned: tuple[Pin, ...]) -> Plan:
    made = replace(strategy(TRAINING, layout), pins=pinned)
    return Compilation(task(TRAINING), example(TRAINING), made).training.plan


@pytest.mark.parametrize(
    ("layout", "pinned"),
    [
        (Layout(data=2), ON_DATA),
        (Layout(tensor=3), ON_TENSOR),  # 4 experts
        (Layout(data=2, tensor=2), ON_TENSOR),
        (Layout(data=2, tensor=2), (*ON_DATA, *INSIDE)),
        (Layout(data=2, stages=2), ON_DATA),
        (Layout(data=2, zero=2), ON_DATA),
    ],
    ids=str,
)
def test_split_experts_train_as_plain_torch(layout: Layout, pinned: tuple[Pin, ...]) -> None:
    found = run_plan(TRAINING, plan(layout, pinned), STEPS)
    assert_as_plain_torch(TRAINING, found)
    assert [note for note in found.plan.graph.notes if "signature" in note] == []


def moved(made: Plan) -> list[Op]:
    return [op for op in made.graph.ops if op.target == "flow.box" and op.args[1].moves]


def test_tokens_travel_to_their_experts_and_back_by_all_to_all() -> None:
    made = plan(Layout(data=2), ON_DATA)
    kinds = Counter(
        (op.phase, op.args[1].kind)
        for op in moved(made)
        if op.phase in (FORWARD, BACKWARD) and made.graph.tensors[op.makes[0]].shape
    )
    assert kinds == {(FORWARD, ALL_TO_ALL): 2 * MIXTURES, (BACKWARD, ALL_TO_ALL): 2 * MIXTURES}


def test_neither_weights_nor_gradients_of_experts_travel() -> None:
    made = plan(Layout(data=2), ON_DATA)
    experts = [v for v in made.graph.variables if ".experts." in v.name]
    assert {v.nd_sbp for v in experts} == {(S(0),)}
    assert [op.name for op in moved(made) if ".experts." in op.inputs[0]] == []
    shapes = {made.graph.tensors[v.tensor].shape for v in experts}
    assert [op.name for op in moved(made) if made.graph.tensors[op.makes[0]].shape in shapes] == []


def test_where_all_ranks_have_all_tokens_the_outputs_are_summed() -> None:
    """Each takes the tokens of its experts: one sum forward, one of the gradients backward."""
    kinds = Counter(
        (op.phase, op.args[1].kind)
        for op in moved(plan(Layout(tensor=2), ON_TENSOR))
        if op.phase in (FORWARD, BACKWARD)
    )
    assert kinds == {(FORWARD, ALL_REDUCE): MIXTURES, (BACKWARD, ALL_REDUCE): MIXTURES}
