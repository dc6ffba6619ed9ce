"""Transforms of images, those of torchvision and timm, whose draws are functions of a seed."""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Transform = Callable[[Any], Any]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images, by channel
# ops of torchvision that its import describes to torch, from its compiled library
_DESCRIBED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_KEPT: list[torch.library.Library] = []  # a library that is collected takes its schemas along
_DRAWING = threading.Lock()  # generators are of the process, and readers are threads


@cache
def import_torchvision() -> None:
    """Import torchvision, also next to a torch that its compiled ops do not fit.

    PyPI's wheel of torchvision is built for PyPI's torch, with CUDA.  Next to a CPU build of the
    same version it cannot load its library, and its import ends at the first op of it that it
    describes: "operator torchvision::nms does not exist".  Transforms and models need none of these
    ops, so those are declared, without a kernel, and the import is repeated.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: pip install 'flowrun[images]'") from None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _DESCRIBED:
            library.define(schema)
        _KEPT.append(library)
        importlib.import_module("torchvision")


@contextmanager
def seed_draws(seed: int) -> Iterator[None]:
    """Seed what transforms draw from, torch's on the CPU, Python's and NumPy's, and restore it."""
    with _DRAWING:
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(seed)  # and no GPU's
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])


def transform(image: object, transforms: Sequence[Transform]) -> Tensor:
    """Take an image of PIL through transforms; return (3, height, width) float32.

    What is then not a float tensor is scaled to 0..1 and normalised as ImageNet's images are.
    """
    from torchvision.transforms.v2 import functional

    for each in transforms:
        image = each(image)
    if isinstance(image, Tensor) and image.is_floating_point():
        return image.as_subclass(Tensor)
    pixels = functional.to_dtype(functional.to_image(image), torch.float32, scale=True)
    normalised: Tensor = functional.normalize(pixels, [*MEAN], [*STD]).as_subclass(Tensor)
    return normalised


def default_transforms(size: int) -> tuple[list[Transform], list[Transform]]:
    """Return the transforms of training and of evaluation.

    The short side is scaled to 8/7 of `size`; a square is cut from that, at random and mirrored or
    not, or from the middle.
    """
    from torchvision.transforms import v2

    scale = v2.Resize(size * 8 // 7)
    return [scale, v2.RandomCrop(size), v2.RandomHorizontalFlip()], [scale, v2.CenterCrop(size)]
