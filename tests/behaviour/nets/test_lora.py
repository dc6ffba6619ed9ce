"""LoRA trains as peft's own does in a plain torch loop, in any layout, and a frozen base costs
neither state nor gradient nor reduction.  So do models that peft has wrapped.
"""

from dataclasses import replace
from functools import partial

import peft
import pytest
import torch
from torch import nn

from flowrun.engine.actors.plan import BoxWork, Plan
from flowrun.launcher.model.adapters import add_adapters
from flowrun.launcher.recipe.schema import Adapters
from flowrun.models.gpt import GPT
from support.layouts.grids import FIVE, Layout, compiled, virtual_run
from support.layouts.plain_loop import CONTEXT, VOCABULARY, gpt, loss_difference, plain_loop, seeded

TOLERANCE = 1e-5  # relative, of the losses of ten steps in fp32: sums in another order
RANK, ALPHA = 4, 8.0
LINEARS = ("qkv", "proj", "fc1", "fc2")


def _base() -> GPT:
    return GPT(VOCABULARY, CONTEXT, 2, 4, 16)


def _ours() -> nn.Module:
    model = _base()
    adapters = tuple(f"*.{name}" for name in LINEARS)
    add_adapters(model, Adapters(rank=RANK, alpha=ALPHA, modules=adapters))
    return model


def _peft() -> nn.Module:
    """The same base and the same A and B."""
    config = peft.LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=list(LINEARS))
    wrapped = peft.get_peft_model(_base(), config)
    given = seeded(_ours).state_dict()
    for name, parameter in wrapped.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parameter.data.copy_(given[plain.replace(".default", "")])
    return wrapped


TRAINING = replace(gpt(2, 16), model=partial(seeded, _ours))
WRAPPED = replace(
    TRAINING,
    model=partial(seeded, _peft),
    pins=tuple(
        replace(
            pin, pattern=f"base_model.model.{pin.pattern}".replace(".weight", ".base_layer.weight")
        )
        for pin in TRAINING.pins
        if any(name in pin.pattern for name in LINEARS)
    ),
)


@pytest.mark.parametrize("layout", FIVE, ids=str)
def test_adapters_train_as_those_of_peft(layout: Layout) -> None:
    found, theirs = virtual_run(TRAINING, layout), plain_loop(WRAPPED)
    assert loss_difference(found.losses, theirs) <= TOLERANCE
    for name, value in plain_loop(TRAINING).before.items():
        assert torch.equal(found.weights[name], value) == ("lora" not in name), name


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(data=2, zero=3)], ids=str)
def test_a_model_that_peft_has_wrapped_trains_the_same(layout: Layout) -> None:
    found = virtual_run(WRAPPED, layout)
    assert loss_difference(found.losses, plain_loop(WRAPPED)) <= TOLERANCE


def _reduced(plan: Plan) -> set[str]:
    """Parameters whose gradients ranks sum or scatter."""
    boxed = {
        move.read
        for actor in plan.actors
        if isinstance(actor.work, BoxWork) and actor.phase == "update"
        for move in actor.work.moves
    }
    parameters = [v.name for v in plan.graph.variables if v.kind == "parameter"]
    return {name for name in parameters if any(f"/{name}" in read for read in boxed)}


def test_a_frozen_base_has_no_state_no_gradient_and_no_reduction() -> None:
    plan = compiled(TRAINING, Layout(data=2, tensor=2)).plan
    states = {v.of for v in plan.graph.variables if v.kind == "state" and v.of}
    gradients = {name.removeprefix("grad/") for name, _ in plan.graph.results if "grad/" in name}
    trained = {v.name for v in plan.graph.variables if "lora" in v.name and v.kind == "parameter"}
    assert states == trained
    assert gradients <= trained
    assert _reduced(plan) == trained


def test_adapters_follow_the_layout_of_the_base() -> None:
    """Columns, then rows: B is split as the columns are, A as the rows, and the rest is whole."""
    plan = compiled(TRAINING, Layout(tensor=2)).plan
    homes = {v.name: str(v.nd_sbp[0]) for v in plan.graph.variables if v.kind == "parameter"}
    block = {name.removeprefix("blocks.0."): home for name, home in homes.items() if "s.0." in name}
    assert {name: block[name] for name in block if "qkv" in name and "bias" not in name} == {
        "attn.qkv.weight": "S(0)",
        "attn.qkv.lora_A.weight": "B",
        "attn.qkv.lora_B.weight": "S(0)",
    }
    assert {name: block[name] for name in block if "fc2" in name and "bias" not in name} == {
        "mlp.fc2.weight": "S(1)",
        "mlp.fc2.lora_A.weight": "S(1)",
        "mlp.fc2.lora_B.weight": "B",
    }


def _with_dropout(share: float) -> nn.Module:
    model = _base()
    add_adapters(model, Adapters(rank=RANK, alpha=ALPHA, modules=("*.qkv",), dropout=share))
    return model


def test_dropout_before_an_adapter_is_the_same_in_any_layout() -> None:
    dropping, none = (
        replace(TRAINING, model=partial(seeded, partial(_with_dropout, p))) for p in (0.5, 0.0)
    )
    one, two = (virtual_run(dropping, layout).losses for layout in (Layout(), Layout(tensor=2)))
    assert two == pytest.approx(one, rel=TOLERANCE)
    assert one != pytest.approx(virtual_run(none, Layout()).losses, rel=TOLERANCE)
