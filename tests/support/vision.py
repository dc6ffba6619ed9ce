"""torchvision and timm, importable beside a torch that torchvision's compiled ops do not fit.

PyPI's wheel of torchvision is built for PyPI's torch, with CUDA; beside a CPU build of the same
version it cannot load its library, and its import ends at the first op of it that it describes to
torch: "operator torchvision::nms does not exist".  Its models need none of these ops, so those that
are described at import are declared, without a kernel, and the import is repeated.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch

DESCRIBED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def versions() -> str:
    """Of torch and of what the architectures come from."""
    names = ("torch", "transformers", "torchvision", "timm")
    there = [f"{name} {version(name).split('+')[0]}" for name in names if find_spec(name)]
    return ", ".join(there)


def is_installed() -> bool:
    """Whether torchvision and timm are there."""
    return all(find_spec(name) is not None for name in ("torchvision", "timm"))


@cache
def make_importable() -> None:
    """Import torchvision where it is there; timm and transformers can then import it too."""
    if not is_installed():
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in DESCRIBED:
            library.define(schema)
        _KEPT.append(library)
        importlib.import_module("torchvision")


_KEPT: list[torch.library.Library] = []  # a library that is collected takes its schemas along
