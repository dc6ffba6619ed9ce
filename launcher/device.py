"""Which device a recipe runs on: asked in the launcher, which must not open CUDA itself."""

from __future__ import annotations

import os

from flowrun.engine.errors import RecipeError
from flowrun.launcher.schema import Recipe


def device_type(recipe: Recipe, here: bool = True) -> str:
    """Answer cpu or cuda.  auto: cuda where this host has a GPU for each of its ranks.

    Raises RecipeError if cuda is asked for and there are not enough; not where it is only planned
    `here`=False, for another host.
    """
    if recipe.launch.device == "cpu" or recipe.launch.name == "virtual":
        return "cpu"
    if recipe.launch.device == "cuda" and not here:
        return "cuda"
    wanted, there = recipe.num_ranks // recipe.launch.nnodes, _num_gpus()
    if there >= wanted:
        return "cuda"
    if recipe.launch.device == "cuda":
        raise RecipeError(
            "launch.device",
            f"{wanted} ranks of this host need a GPU each; torch sees {there}.",
            "Use fewer ranks, or launch.device=cpu.",
        )
    return "cpu"


def _num_gpus() -> int:
    # by NVML: a count through the CUDA runtime would make CUDA unusable in forked workers
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
