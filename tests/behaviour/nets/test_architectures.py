"""Models of `transformers`, torchvision and timm, unmodified, train on a grid of ranks as in plain
torch.

Three steps in fp32; losses and weights within 1e-4, these as a share of the way that training moved
them (measured: 3e-7 and 5e-5). Each architecture has one or two of the layouts here; all of all are
in docs/measured/architectures.md.
"""

import pytest

from support.layouts.grids import virtual_run
from support.layouts.plain_loop import plain_loop
from support.nets.architecture import BOUND, LAYOUTS, PINNED, STEPS, apart
from support.nets.architectures import ARCHITECTURES, training

ZERO = "data 2, ZeRO 2"
TESTED = {
    "gpt2": ("data 2", PINNED),
    "llama": (ZERO, PINNED),
    "gemma3": (PINNED,),
    "opt": (PINNED,),
    "bert": ("data 2", "tensor 2"),
    "deberta_v2": ("data 2",),
    "xlnet": ("stages 2",),
    "t5": (PINNED,),
    "bart": ("data 2",),
    "mixtral": ("data 2", "tensor 2"),
    "gpt_oss": (PINNED,),
    "mamba2": ("data 2",),
    "whisper": (PINNED,),
    "vit": (ZERO, "tensor 2"),
    "convnext": (PINNED,),
    "resnet": ("data 2", "stages 2"),
    "patchtst": (ZERO,),
    "tv_densenet": ("data 2",),
    "tv_swin": (PINNED,),
    "mixer": (ZERO,),
    "nfnet": ("stages 2",),
}
# with others of their kind
OF_A_KIND = {
    ("gpt2", "data 2"),
    ("opt", PINNED),
    ("bert", "data 2"),
    ("bart", "data 2"),
    ("mixtral", "tensor 2"),
    ("resnet", "data 2"),
}
CASES = [
    pytest.param(
        name,
        layout,
        id=f"{name}, {layout}",
        marks=pytest.mark.thorough if (name, layout) in OF_A_KIND else (),
    )
    for name, layouts in TESTED.items()
    for layout in layouts
    if name in ARCHITECTURES
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_trains_as_plain_torch(name: str, layout: str) -> None:
    given = training(name)
    found = virtual_run(given, LAYOUTS[layout], STEPS)
    difference = apart(found.losses, found.weights, plain_loop(given, 0.0, STEPS))
    assert difference.within(BOUND, BOUND), difference
