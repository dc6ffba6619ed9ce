"""Experts split by S(0) of their stacked weights: tokens travel to them and back by all-to-all.
Without capacity each rank takes the tokens of its experts, and what they make is summed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.actors.plan import Plan
from flowrun.engine.boxing.boxing import ALL_REDUCE, ALL_TO_ALL
from flowrun.engine.compile import Compilation
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, FORWARD, Op
from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import Pin
from flowrun.models.losses import routed_cross_entropy
from flowrun.models.metrics import accuracy
from flowrun.models.moe import DroplessMixture, Experts, MixtureGPT
from support.layouts.grids import (
    LOSS_TOLERANCE,
    WEIGHT_TOLERANCE,
    Layout,
    assert_as_plain_torch,
    example,
    run_plan,
    strategy,
    task,
)
from support.layouts.plain_loop import (
    ADAMW,
    CONTEXT,
    VOCABULARY,
    Trained,
    Training,
    loss_difference,
    micro_batch_loop,
    plain_loop,
    seeded,
    token_batches,
    weight_difference,
)
from support.nets.architecture import BOUND, apart
from support.nets.transformers_models import TRANSFORMERS

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


EXPERTS = 4


class DenseExperts(Experts):
    """Every expert multiplies every token; the weights of those that it did not choose are 0."""

    def forward(self, x_ND: Tensor, expert_NK: Tensor, share_NK: Tensor) -> Tensor:  # type: ignore[override]
        weight_NE = x_ND.new_zeros(len(x_ND), EXPERTS).scatter(1, expert_NK, share_NK)
        y_END = super().forward(x_ND.expand(EXPERTS, *x_ND.shape))
        return torch.einsum("ne,end->nd", weight_NE, y_END)


def dropless(dense: bool) -> nn.Module:
    """Return a model with a bias that balances its experts, and one for all tokens."""
    sizes = VOCABULARY, CONTEXT, 2, 2, 16, EXPERTS, 2, None, 0.01, True
    model = seeded(partial(MixtureGPT, *sizes))
    for part in model.modules() if dense else ():
        if isinstance(part, DroplessMixture):
            part.experts.__class__ = DenseExperts
    return model


DROPLESS, DENSE = (replace(TRAINING, model=partial(dropless, dense)) for dense in (False, True))

ON_DATA = pins("data", {"up": 0, "down": 0})
ON_TENSOR = pins("tensor", {"up": 0, "down": 0})
INSIDE = pins("tensor", {"up": 2, "down": 1})  # each expert split by columns, then rows


@lru_cache
def plan(layout: Layout, pinned: tuple[Pin, ...], training: Training = TRAINING) -> Plan:
    made = replace(strategy(training, layout), pins=pinned)
    return Compilation(task(training), example(training), made).training.plan


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


@pytest.mark.parametrize(
    ("layout", "pinned"),
    [
        (Layout(tensor=2), ON_TENSOR),
        (Layout(tensor=4), ON_TENSOR),
        (Layout(data=2), ON_DATA),
        (Layout(data=2), ()),
        (Layout(data=2, tensor=2), ON_TENSOR),
        (Layout(data=2, tensor=2), (*ON_DATA, *INSIDE)),
        (Layout(data=2, stages=2), ()),
        (Layout(data=2, zero=3), ()),
        (Layout(data=2, room=2.0), ON_DATA),
        (Layout(data=4, room=4.0), ON_DATA),
        (Layout(data=2, zero=2, room=2.0), ON_DATA),
        (Layout(data=2, stages=2, room=2.0), ON_DATA),
        (Layout(data=2, tensor=2, room=2.0), (*ON_DATA, *INSIDE)),
        (Layout(data=2, tensor=2, room=2.0), (*ON_DATA, *ON_TENSOR)),
    ],
    ids=str,
)
def test_experts_without_capacity_train_as_a_dense_computation_of_the_same_routes(
    layout: Layout, pinned: tuple[Pin, ...]
) -> None:
    found = run_plan(DROPLESS, plan(layout, pinned, DROPLESS), STEPS)
    losses, after = micro_batch_loop(DENSE, STEPS)
    plain = Trained(tuple(losses), dropless(dense=True).state_dict(), after)
    assert loss_difference(found.losses, plain) <= LOSS_TOLERANCE
    assert weight_difference(found.weights, plain) <= WEIGHT_TOLERANCE["adamw"]
    assert [note for note in found.plan.graph.notes if "signature" in note] == []


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2), Layout(tensor=4), Layout(data=2, tensor=2), Layout(data=2, room=2.0)],
    ids=str,
)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_split_experts_of_transformers_train_as_plain_torch(name: str, layout: Layout) -> None:
    training = TRANSFORMERS[name].training()
    dims = {"*.experts.gate_up_proj": 0, "*.experts.down_proj": 0}
    axis = "data" if layout.room else "tensor"
    pinned = tuple(Pin(each, "variable", axis, S(dim)) for each, dim in dims.items())
    found = run_plan(training, plan(layout, pinned, training), len(training.batches))
    plain = plain_loop(training, 0.0, len(found.losses))
    assert apart(found.losses, found.weights, plain).within(LOSS_TOLERANCE, BOUND)


def test_where_experts_are_split_one_sum_of_their_outputs_travels() -> None:
    """And one of the gradients of tokens backward."""
    assert kinds_moved(plan(Layout(tensor=2), ON_TENSOR, DROPLESS)) == {
        (FORWARD, ALL_REDUCE): MIXTURES,
        (BACKWARD, ALL_REDUCE): MIXTURES,
    }


def test_with_room_tokens_travel_by_all_to_all_and_none_is_gathered() -> None:
    """Rows and numbers go, and come back; backward gradients and shares, too."""
    assert kinds_moved(plan(Layout(data=2, room=2.0), ON_DATA, DROPLESS)) == {
        (FORWARD, ALL_TO_ALL): 3 * MIXTURES,
        (BACKWARD, ALL_TO_ALL): 6 * MIXTURES,
        (FORWARD, ALL_REDUCE): MIXTURES,  # how often each expert was chosen, for the bias
    }


def test_room_that_no_token_uses_is_said() -> None:
    """Each rank has all experts."""
    notes = plan(Layout(data=2, room=2.0), (), DROPLESS).graph.notes
    assert [note for note in notes if "engine.expert_room has no effect on blocks.1" in note]
    assert "expert_room" not in str(plan(Layout(data=2, room=2.0), ON_DATA, DROPLESS).graph.notes)


def test_room_without_experts_is_refused() -> None:
    with pytest.raises(RecipeError, match="no experts without capacity"):
        plan(Layout(data=2, room=2.0), ON_DATA)


def test_where_samples_are_split_no_token_travels() -> None:
    """Only what the experts were chosen for, four numbers, which the bias waits for."""
    made = plan(Layout(data=2), (), DROPLESS)
    sizes = [(op.phase, made.graph.tensors[op.makes[0]].shape) for op in moved(made)]
    assert [each for each in sizes if each[0] in (FORWARD, BACKWARD) and each[1]] == [
        (FORWARD, (EXPERTS,))
    ]


def kinds_moved(made: Plan) -> Counter[tuple[str, str]]:
    return Counter(
        (op.phase, op.args[1].kind) for op in moved(made) if op.phase in (FORWARD, BACKWARD)
    )


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
    assert kinds_moved(plan(Layout(tensor=2), ON_TENSOR)) == {
        (FORWARD, ALL_REDUCE): MIXTURES,
        (BACKWARD, ALL_REDUCE): MIXTURES,
    }
