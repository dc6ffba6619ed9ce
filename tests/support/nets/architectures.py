"""All architectures that are trained in every layout beside plain torch: those of the paper, of
`transformers`, and of torchvision and timm where these are installed.
"""

from collections.abc import Mapping
from functools import cache

from support.layouts.plain_loop import Training
from support.nets.architecture import Architecture
from support.nets.paper_models import PAPER_MODELS
from support.nets.transformers_models import TRANSFORMERS
from support.nets.vision import is_installed
from support.nets.vision_models import VISION

ARCHITECTURES: Mapping[str, Architecture] = {
    **PAPER_MODELS,
    **TRANSFORMERS,
    **(VISION if is_installed() else {}),
}


@cache
def training(name: str, layers: int = 1) -> Training:
    return ARCHITECTURES[name].training(layers)
