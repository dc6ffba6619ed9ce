"""The hardware profile of a recipe: what is wrong with it, and what one rank of the launch has of
it.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.hardware import CPU, PRODUCT_DTYPES, Hardware, Products, on_hosts
from flowrun.engine.hardware.measured_ops import shapes_of
from flowrun.engine.hardware.network import Level
from flowrun.engine.runtime.process.cpu_share import PROBE
from flowrun.launcher.recipe.device import device_type, gpu_name
from flowrun.launcher.recipe.hydra_source import CONF
from flowrun.launcher.recipe.key_schema import schema
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import require
from flowrun.launcher.recipe.schema import RecipeSchema

if TYPE_CHECKING:  # torch takes seconds to import
    from flowrun.engine.runtime.calibration.quick_probe import Scales

# by what the driver calls them; other variants of a model (PCIe, half the memory) have its profile
_GPUS = {
    "V100-SXM2-16GB": "v100_cluster",
    "A100-SXM4-80GB": "dgx_a100",
    "H100 80GB HBM3": "h100",
    "H200": "h200",
    "B200": "b200",
}
_ANY_GPU = "dgx_a100"


def rank_hardware(recipe: Recipe, ranks: int = 0, scales: Scales | None = None) -> Hardware:
    """The hardware of one rank.  On CPUs the ranks of a host share its cores, and may share its
    memory.  ranks: on how many it runs, if not on those of its placement.  scales: of this machine.
    """
    hardware, launch = choose_profile(recipe), recipe.launch
    hardware = scales.of(hardware) if scales else hardware
    ranks = math.ceil((ranks or recipe.num_ranks) / launch.num_hosts)
    levels = on_hosts(hardware.levels, ranks, shares_memory(recipe))
    hardware = replace(hardware, levels=levels)
    if hardware.device != CPU or launch.name != "local":
        return hardware
    cores = (os.cpu_count() or 1) / (ranks * launch.threads)
    slowed = hardware.slow_down(min(1.0, cores))
    if launch.num_hosts > 1:  # the clock knows one host
        return replace(slowed, core=1.0)
    return replace(slowed, cores=cores)


def choose_profile(recipe: Recipe) -> Hardware:
    """Choose the recipe's profile, or that of this host's GPUs if the recipe runs on them and its
    profile is of a processor (like the profile of a recipe that names none).
    """
    named, ranks = recipe.hardware, recipe.num_ranks
    if named.device != CPU or device_type(recipe.launch, ranks, here=False) == "cpu":
        return named
    return load_shipped(_of_gpu(gpu_name())[0])


def may_scale(recipe: Recipe) -> bool:
    """Ranks run on this host's processors alone, and the profile is `cpu` as it is shipped."""
    launch, profile = recipe.launch, replace(choose_profile(recipe), memory_bytes=0)
    here = launch.name == "local" and launch.num_hosts == 1 and os.environ.get(PROBE) != "0"
    return here and profile == load_shipped(CPU)


def is_stand_in(recipe: Recipe) -> bool:
    """The profile was chosen for this host's GPUs, and is of another GPU."""
    return choose_profile(recipe) is not recipe.hardware and not _of_gpu(gpu_name())[1]


def _of_gpu(name: str) -> tuple[str, bool]:
    """(a shipped profile, whether it is of that very GPU) by the driver's name of it."""
    for model, profile in _GPUS.items():
        if re.split("[- ]", model)[0] in name:
            return profile, bool(re.search(rf"\b{model}$", name))
    return _ANY_GPU, False


def shares_memory(recipe: Recipe) -> bool:
    """All ranks exchange their messages in the memory of one host (transport/links.py), and the
    profile is of such ranks: GPUs may be planned for on a machine without.
    """
    launch = recipe.launch
    there = launch.name == "local" and launch.num_hosts == 1 and sys.platform == "linux"
    return there and launch.transport != "gloo" and choose_profile(recipe).device == CPU


@cache
def load_shipped(name: str) -> Hardware:
    """Load a profile that comes with flowrun."""
    return of_file(CONF / "hardware" / f"{name}.yaml")


def of_file(file: Path) -> Hardware:
    """A file of the group `hardware`, over those of its folder that its defaults list names."""
    own = DictConfig(OmegaConf.load(file))
    under = [OmegaConf.load(file.with_name(f"{b}.yaml")) for b in own.pop("defaults", [])[:-1]]
    tree = OmegaConf.to_object(OmegaConf.merge(schema()["hardware"], *under, own))
    assert isinstance(tree, Hardware), "the schema says so"
    return tree


def check_hardware(recipe: RecipeSchema) -> None:
    """Raises RecipeError where the numbers of the profile cannot be."""
    hardware = recipe.hardware
    for target, known in hardware.ops.items():
        for text in known:
            try:
                shapes_of(text)
            except ValueError as error:
                problem = f"{text!r} cannot be read as shapes: {error}."
                instead = 'Write them as "fp32 8x64 64x32 8x32".'
                raise RecipeError(f"hardware.ops.{target}", problem, instead) from error
    for dtype in PRODUCT_DTYPES:
        products: Products = getattr(hardware, dtype)
        _check_curve(f"hardware.{dtype}", flop=products.flop, share=products.share)
    for at, table in enumerate(hardware.attention):
        where = f"hardware.attention.{at}"
        require(bool(table.keys), f"{where}.keys", "it is empty.", "Write numbers of keys.")
        _check_curve(where, keys=table.keys, forward=table.forward, backward=table.backward)
    require(bool(hardware.levels), "hardware.levels", "it is empty: nothing joins ranks.")
    below = 1
    for at, level in enumerate(hardware.levels):
        _check_level(level, below, f"hardware.levels.{at}")
        below = level.ranks or below


def _check_curve(where: str, **columns: tuple[float, ...]) -> None:
    """The first column has the points, each other a value for each of them."""
    (name, points), *others = columns.items()
    require(
        all(one < two for one, two in itertools.pairwise((0.0, *points))),
        f"{where}.{name}",
        f"{list(points)} does not grow from over 0.",
    )
    for key, values in others:
        require(
            len(values) == len(points),
            f"{where}.{key}",
            f"{list(values)} has another length than {name}, {list(points)}.",
            f"Write one share for each of {name}.",
        )


def _check_level(level: Level, below: int, where: str) -> None:
    require(
        level.busy_s <= level.latency_s,
        f"{where}.busy_s",
        f"{level.busy_s} is more than latency_s, {level.latency_s}, of which it is a part.",
        "Write 0 to latency_s seconds: what a rank's core does before the first byte.",
    )
    require(
        not level.ranks or (level.ranks > below and level.ranks % below == 0),
        f"{where}.ranks",
        f"{level.ranks} is not a multiple of {below}, the ranks of a unit inside.",
        "Write how many consecutive ranks one unit joins; 0 joins all.",
    )
    if level.mesh:
        _check_mesh(level, below, where)
    for members, num_bytes in level.exchange_bytes.items():
        require(
            members > 1 and not level.shared_memory,
            f"{where}.exchange_bytes",
            f"{members}: {num_bytes} is not a size of a group and of its messages on this level.",
            "Write 2 members or more and 0 bytes or more, where ranks do not share memory.",
        )


def _check_mesh(level: Level, below: int, where: str) -> None:
    mesh, size = level.mesh, len(level.mesh)
    require(
        below == 1,
        f"{where}.mesh",
        f"this is not of the innermost level: it joins units of {below} ranks.",
        "Leave it out: beyond a unit there is a switch.",
    )
    require(
        size == level.ranks,
        f"{where}.mesh",
        f"a mesh of {size} ranks joins no unit of {level.ranks or 'all'}.",
        "Give a row for each rank of the level, or none: a switch.",
    )
    square = all(len(row) == size and row.isdecimal() and int(row) for row in mesh)
    alike = square and mesh == tuple(map("".join, zip(*mesh, strict=True)))
    require(
        alike and all(row[rank] == "0" for rank, row in enumerate(mesh)),
        f"{where}.mesh",
        f"{', '.join(mesh)} does not give the links between {size} ranks.",
        "Write a digit for each other rank, the same both ways, 0 for the rank itself.",
    )
