"""Models of `transformers`, unmodified, train on a grid of ranks as in a plain torch loop.

Five steps in fp32; losses within 1e-5 relative (measured: 2e-7), weights within 1e-3 of the way
that training moved them. Each architecture has two of the layouts here; all of them are in
docs/architectures.md.
"""

from __future__ import annotations

import pytest

from support.architecture import LAYOUTS, LOSS_TOLERANCE, PINNED, STEPS, weights_apart
from support.architectures import training, unpinned
from support.layouts import virtual_run
from support.plain_loop import loss_difference, plain_loop

WEIGHT_TOLERANCE = 1e-3

TESTED = {
    "gpt2": ("data 2", PINNED),
    "llama": ("data 2 x stages 2, ZeRO 2", PINNED),
    "qwen2": ("tensor 2",),
    "mistral": ("stages 2",),
    "gemma": (PINNED,),
    "neox": ("data 2",),
    "opt": (PINNED,),
    "bert": ("data 2", "tensor 2"),
    "roberta": ("stages 2",),
    "distilbert": (PINNED,),
    "t5": (PINNED,),
    "bart": ("data 2",),
    "vit": ("data 2 x stages 2, ZeRO 2", "tensor 2"),
    "convnext": (PINNED,),
    "resnet": ("data 2",),
    "mixtral": ("data 2", "tensor 2"),
    "qwen2_moe": ("data 2",),
}
CASES = [(name, layout) for name, layouts in TESTED.items() for layout in layouts]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_trains_as_plain_torch(name: str, layout: str) -> None:
    run_of = training if layout == PINNED else unpinned
    plain = plain_loop(training(name), 0.0, STEPS)
    found = virtual_run(run_of(name), LAYOUTS[layout], STEPS)
    assert loss_difference(found.losses, plain) <= LOSS_TOLERANCE
    assert weights_apart(found.weights, plain) <= WEIGHT_TOLERANCE
