"""Find out whether a recipe runs on this host, and on the CPU or on CUDA.

The launcher asks NVML, not CUDA: once a process has opened CUDA, its forks cannot use it.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import one_of
from flowrun.launcher.recipe.schema import EAGER, HANDWRITTEN, INDUCTOR, Launch

# NCCL 2.30 and later: ranks of a host may share its GPUs, and take turns on them
SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"


def check_runs(recipe: Recipe) -> None:
    """Raises RecipeError for kernels that are there to plan with alone, for jobs of a cluster that
    would run here (slurm.py and ray_jobs.py submit them), and for GPUs that this host lacks.
    """
    if (name := recipe.launch.name) in ("slurm", "ray"):
        raise RecipeError(
            "launch.name",
            f"{name} is for `flowrun recipe=…`, which submits a job; here it would run on this"
            " host.",
            "Write launch.name=local.",
        )
    if recipe.seat.waits:  # of the command, those leave with the first's status
        raise RecipeError(
            "launch.nnodes",
            f"{recipe.seat.notes[0]}.",
            "Start one process on each host, or call flowrun.run in the first of them alone.",
        )
    device_type(recipe.launch, recipe.num_ranks)  # raises where GPUs are asked for and not here
    if recipe.engine.compiler == HANDWRITTEN:
        raise RecipeError(
            "engine.compiler",
            "handwritten kernels are those of other systems: they are planned with, and not run.",
            f"Write {one_of((EAGER, INDUCTOR))}.",
        )


def device_type(launch: Launch, num_ranks: int, here: bool = True) -> str:
    """Answer cpu or cuda.  auto: cuda where this host has a GPU for each of its ranks.

    num_ranks: of all hosts.  Raises RecipeError if cuda is asked for and there are not enough; not
    where it is only planned `here`=False, for another host.
    """
    if launch.device == "cpu" or launch.name == "virtual":
        return "cpu"
    if launch.device == "cuda" and not here:
        return "cuda"
    wanted, there = max(1, num_ranks // launch.num_hosts), _num_gpus()
    if there >= wanted or (there and os.environ.get(SHARES_GPUS) == "1"):
        return "cuda"
    if launch.device == "cuda":
        raise RecipeError(
            "launch.device",
            f"{wanted} ranks of this host need a GPU each; torch sees {there}.",
            f"Use fewer ranks, or launch.device=cpu. {SHARES_GPUS}=1 has ranks share a GPU.",
        )
    return "cpu"


def forks_autograd() -> bool:
    """Return True if autograd, and capture with it, is to run in a fork of its own.

    It is where torch is built for GPUs, also on a host without one: no fork of a process that has
    run autograd can run it there, or open CUDA, which the next recipe of a sweep may use.
    """
    import torch

    return torch.backends.cuda.is_built() or _num_gpus() > 0


def _num_gpus() -> int:
    # by NVML: a count through the CUDA runtime would make CUDA unusable in forked workers
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@cache
def gpu_name() -> str:
    """This host's first GPU as its driver calls it, "NVIDIA H100 80GB HBM3"; "" without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    found = (
        nvml.nvmlInit_v2() == 0
        and nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
        and nvml.nvmlDeviceGetName(device, name, len(name)) == 0
    )
    return name.value.decode() if found else ""
