from dataclasses import replace
from functools import partial

import pytest

from flowrun.engine.hardware.hardware import Hardware, Products
from flowrun.engine.strategy import Recompute
from flowrun.engine.trace.model_flops import model_flops, utilisation
from flowrun.models.losses import routed_cross_entropy
from flowrun.models.moe import MixtureGPT
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import CONTEXT, TINY_GPT, TINY_MLP, VOCABULARY, Training, seeded
from support.nets.transformers_models import TRANSFORMERS

LAYOUTS = (
    Layout(data=2),
    Layout(tensor=2),
    Layout(stages=2),
    Layout(data=2, zero=3),
    Layout(recompute=Recompute(("blocks.*",))),
)


def test_an_mlp_multiplies_thrice_with_each_weight_but_the_first() -> None:
    """The first layer's input wants no gradient."""
    model, batch = TINY_MLP.model(), TINY_MLP.batches[0]
    samples = len(next(iter(batch.values())))
    first, *rest = (p.numel() for p in model.parameters() if p.dim() > 1)
    expected = 2 * samples * (2 * first + 3 * sum(rest))
    assert model_flops(compiled(TINY_MLP, Layout()).plan) == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_is_the_same_in_every_layout(layout: Layout) -> None:
    plan = compiled(TINY_GPT, layout).plan
    assert model_flops(plan) == pytest.approx(model_flops(compiled(TINY_GPT, Layout()).plan))


def test_attention_counts_whole_and_once() -> None:
    """PaLM's 6 N + 12 L H Q T for each token, with N the weights that are multiplied with."""
    model, plan = TINY_GPT.model(), compiled(TINY_GPT, Layout()).plan
    tokens = TINY_GPT.batches[0]["tokens"]
    length = tokens.shape[1]
    weights = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name
    )
    width = model.blocks[0].attn.proj.in_features
    attention = 12 * len(model.blocks) * width * length
    assert model_flops(plan) == pytest.approx(tokens.numel() * (6 * weights + attention), rel=1e-9)


def dropless() -> Training:
    sizes = VOCABULARY, CONTEXT, 2, 2, 16, 4, 2, None
    make = partial(seeded, partial(MixtureGPT, *sizes))
    return replace(TINY_GPT, model=make, inputs={"tokens_BT": "tokens"}, loss=routed_cross_entropy)


@pytest.mark.parametrize(
    ("name", "training"), [("", dropless()), ("gated_", TRANSFORMERS["mixtral"].training())]
)
def test_what_experts_multiply_again_is_not_counted(name: str, training: Training) -> None:
    plan = compiled(training, Layout()).plan
    forward, backward = (
        model_flops(replace(plan, graph=replace(plan.graph, ops=tuple(ops))))
        for end in ("", "_backward")
        if (
            ops := [
                op for op in plan.graph.ops if op.target == f"flowrun.{name}experts{end}.default"
            ]
        )
    )
    assert backward == 2 * forward > 0


def test_utilisation_is_of_all_ranks() -> None:
    plan, hardware = compiled(TINY_MLP, Layout(data=2)).plan, Hardware(fp32=Products(1e9))
    assert utilisation(plan, hardware, "fp32", 0.5) == pytest.approx(model_flops(plan) / 1e9)
    assert utilisation(plan, hardware, "fp32", 0.0) == 0.0
