"""Every program takes seconds of the C++ compiler, so layouts are few and models one block deep."""

from functools import partial

import pytest

from flowrun.engine.runtime.inductor.built import BuiltRegions
from flowrun.models.gpt import GPT
from support.layouts.grids import CLIP, Layout, assert_as_plain_torch, compiled, run_plan
from support.layouts.plain_loop import MEGATRON, STEPS, TINY_MLP, VOCABULARY, Training, gpt
from support.nets.packed import LENGTH, trainings

SMALL_GPT = gpt(blocks=1, width=16)
SMALL_PACKED, _ = trainings(partial(GPT, VOCABULARY, LENGTH, 1, 4, 16), MEGATRON)
CASES = (
    (TINY_MLP, Layout(data=2, zero=1)),
    pytest.param(SMALL_GPT, Layout(tensor=2, stages=2, clip_norm=CLIP), marks=pytest.mark.thorough),
    pytest.param(SMALL_GPT, Layout(tensor=2, clip_norm=CLIP), marks=pytest.mark.thorough),
    pytest.param(SMALL_PACKED, Layout(), marks=pytest.mark.thorough),
)


@pytest.mark.parametrize(
    ("training", "layout"), CASES, ids=["mlp ZeRO", "gpt in stages", "gpt split", "gpt packed"]
)
def test_compiled_regions_train_as_plain_torch(training: Training, layout: Layout) -> None:
    plan = compiled(training, layout).plan
    found = run_plan(training, plan, STEPS, kernels=BuiltRegions(plan, "cpu", 1))
    assert_as_plain_torch(training, found, layout.clip_norm)
