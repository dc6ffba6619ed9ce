"""calibrate: what this machine does, as a hardware profile.

Forked processes, one thread each, as the launcher makes them: two measure their devices at the same
time, then every collective between 2 and between 4, and messages, over shared memory and gloo.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import yaml
from rich.console import Console
from rich.table import Table

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.network import Level
from flowrun.engine.runtime.calibration import calibrated
from flowrun.engine.runtime.calibration.calibration import (
    ProbeSizes,
    device_times,
    link_times,
    measure_alone,
    meeting,
    paces,
)
from flowrun.engine.runtime.calibration.op_times import TimeRatios, measure_op_times
from flowrun.engine.runtime.process.core import pin_to_core
from flowrun.engine.runtime.process.cpu_share import count_seconds, share_of_others
from flowrun.engine.runtime.transport import host_peers
from flowrun.launcher.job.forked import run_in_forks
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.terminal import doing

SHARED, GLOO = "shared memory", "gloo"
GROUPS = (2, 4)
BUSY = 0.03  # share of the cores that others may have
_BESIDE = 2  # processes that measure ops at once, as ranks compute at the same time
STEPS = 8
ROUNDS = 3  # of all recipes in turn: what others share is slower in one minute than another
THOROUGH = ProbeSizes(
    products=(
        (128, 64, 64),
        (256, 128, 128),
        (256, 256, 256),
        (512, 256, 512),
        (512, 512, 1024),
        (1024, 1024, 1024),
    ),
    dtypes=("fp32", "bf16"),
    stream_bytes=1 << 24,
    moved_bytes=(1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23),
    trials=15,
    pace_s=0.5,
    pace_rounds=5,
    rounds=3,
)


@dataclass(frozen=True, slots=True)
class Session:
    """A session: what some processes measure together.

    device: measure the device of a rank, too, before the links.  paced: measure how fast they
    compute at the same time, after the links; there are more of them than cores.
    """

    ranks: int
    transport: str
    device: bool
    paced: bool


@dataclass(frozen=True, slots=True)
class OfRank:
    """A rank's measurements."""

    device: Sequence[calibrated.TimedWork]
    links: Sequence[calibrated.Moved]
    paces: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The profile, and the links as they were timed: (transport, Moved), of rank 0.

    others: share of the host's cores that other programs had.
    """

    hardware: Hardware
    links: tuple[tuple[str, calibrated.Moved], ...]
    others: float


def calibrate(
    shipped: Hardware, name: str, sizes: ProbeSizes, groups: Sequence[int]
) -> Calibration:
    """Measure this machine.

    shipped: the profile for what is not measured.  name: of the new profile.  sizes: of what is
    timed.  groups: numbers of ranks; links are fitted to the first, whose ranks should have a core
    each, and their latency with fewer cores than ranks to the others.
    """
    transports = (SHARED, GLOO) if host_peers.AVAILABLE else (GLOO,)
    hardware = replace(shipped, name=name, source=f"flowrun calibrate, torch {torch.__version__}")
    sessions, begun = _sessions(transports, groups), count_seconds()
    rounds = [
        [_measure_ranks(session, sizes, number) for session in sessions]
        for number in range(sizes.rounds)
    ]
    doing.clear()
    others = share_of_others(begun)
    links: list[tuple[str, calibrated.Moved]] = []
    levels = {name: Level(taken=1.0, shared_memory=name == SHARED) for name in transports}
    crowded = 1.0
    for session, same in zip(sessions, zip(*rounds, strict=True), strict=True):
        of_ranks = [_typical(each) for each in zip(*same, strict=True)]
        of_links = of_ranks[0].links
        if session.paced:
            share = calibrated.crowded_share([each.paces for each in of_ranks], os.cpu_count() or 1)
            crowded = min(crowded, share)
        if session.device:
            hardware = calibrated.with_device(
                hardware, [one for each in of_ranks for one in each.device]
            )
        level = levels[session.transport]
        levels[session.transport] = _fit_level(level, session, of_links, groups[0])
        links += [(session.transport, moved) for moved in of_links]
    hardware = replace(hardware, levels=tuple(levels.values()), crowded_share=crowded)
    return Calibration(hardware, tuple(links), others)


def _sessions(transports: Sequence[str], groups: Sequence[int]) -> list[Session]:
    """Return what is measured; what carries messages does not matter to the rest."""
    return [
        Session(
            ranks,
            transport,
            device=(transport, ranks) == (transports[0], groups[0]),
            paced=transport == transports[0] and _share_of_core(ranks) < 1,
        )
        for transport in transports
        for ranks in groups
    ]


def _fit_level(
    level: Level, session: Session, links: Sequence[calibrated.Moved], first: int
) -> Level:
    """Fit the links of a transport to what a session has measured.

    level: as sessions before have fitted it.  first: ranks of the session that it is fitted to;
    others add what messages cost with fewer cores than ranks.
    """
    if not level.shared_memory:
        known = {**level.exchange_bytes, session.ranks: calibrated.exchange_bytes(links)}
        level = replace(level, exchange_bytes=known)
    fitted = calibrated.level_of(links, level)
    if session.ranks == first:
        return fitted
    if _share_of_core(session.ranks) < 1:
        return replace(level, crowded_latency_s=fitted.latency_s)
    return level


def _typical(rounds: Sequence[OfRank]) -> OfRank:
    """Take medians of what one rank measured in all rounds."""
    return OfRank(
        calibrated.typical([each.device for each in rounds]),
        calibrated.typical([each.links for each in rounds]),
        [pace for each in rounds for pace in each.paces],
    )


def _share_of_core(ranks: int) -> float:
    return min(1.0, (os.cpu_count() or 1) / ranks)


def write(hardware: Hardware, file: Path) -> None:
    """Write a profile as a file of the group `hardware`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(
        dict(calibrated.as_yaml(hardware)), sort_keys=False, default_flow_style=None
    )
    file.write_text(f"# Written by flowrun calibrate.\n{text}", encoding="utf-8")


def show(found: Calibration, shipped: Hardware, console: Console) -> None:
    """Print what was measured next to the shipped profile, and each collective next to what the
    profile foresees.
    """
    table = Table("what", found.hardware.name, shipped.name, box=None)
    known = _quantities(shipped)
    for name, value in _quantities(found.hardware).items():
        table.add_row(name, f"{value:,.4g}", f"{known[name]:,.4g}" if name in known else "")
    console.print(table)
    table = Table("links", "ranks", "bytes of a rank", "measured", "foreseen", box=None)
    levels = {_transport(level): level for level in found.hardware.levels}
    for transport, moved in found.links:
        level = levels[transport].slow_down(_share_of_core(moved.members))
        foreseen = level.latency_s + moved.sent_bytes / level.bytes_per_s
        table.add_row(
            f"{transport}, {moved.kind}{' between ops' if moved.between_ops else ''}",
            str(moved.members),
            f"{moved.sent_bytes:,.0f}",
            f"{moved.seconds * 1e6:,.0f} us",
            f"{foreseen * 1e6:,.0f} us" if calibrated.is_used(moved, level) else "not used",
        )
    console.print(table)
    if found.others > BUSY:
        console.print(
            f"note: other programs took {found.others:.0%} of the cores, so that this "
            "profile foresees too long. Measure again when the machine is quiet.",
            style="yellow",
            highlight=False,
        )


# Key of a profile -> what it is, in which unit.
_KEYS = {
    "memory_bytes_per_s": ("streams, GB/s", 1e9),
    "backward_share": ("gradients of inputs, share", 1.0),
    "weight_grad_share": ("gradients of weights, share", 1.0),
    "convolution_share": ("convolutions, share", 1.0),
    "batched_share": ("products of heads, share", 1.0),
    "attention_share": ("attention, share", 1.0),
    "crowded_share": ("ranks that share cores, share", 1.0),
    "op_s": ("an op, us", 1e-6),
    "act_s": ("an act, us", 1e-6),
}
_LEVEL_KEYS = {
    "latency_s": ("latency, us", 1e-6),
    "busy_s": ("of it the core's own, us", 1e-6),
    "crowded_latency_s": ("latency with more ranks than cores, us", 1e-6),
    "bytes_per_s": ("GB/s", 1e9),
}


def _quantities(hardware: Hardware) -> dict[str, float]:
    """Return what a profile says, by name with the unit."""
    found = {}
    for dtype, flop in itertools.product(("fp32", "bf16", "fp16"), (1e6, 1e8, 1e9)):
        products = hardware.products(dtype)
        speed = products.flops * products.share_at(flop) / 1e9
        found[f"{dtype} products of {flop:.0e} flop, GFLOP/s"] = speed
    found |= {label: getattr(hardware, key) / unit for key, (label, unit) in _KEYS.items()}
    found |= {f"{op}, G elements/s": x / 1e9 for op, x in hardware.elements_per_s.items()}
    for level in hardware.levels:
        via = _transport(level)
        for key, (label, unit) in _LEVEL_KEYS.items():
            found[f"{via}, {label}"] = getattr(level, key) / unit
        for ranks in level.exchange_bytes:
            name = f"{via}, all-reduces of {ranks} exchanged up to, kB"
            found[name] = level.max_exchange_bytes(ranks) / 1e3
    return found


def _transport(level: Level) -> str:
    return SHARED if level.shared_memory else GLOO


def _measure_ranks(session: Session, sizes: ProbeSizes, number: int) -> list[OfRank]:
    """Say on the terminal what is measured, and measure it.  number: of the round, from 0."""
    what = "operations and links" if session.device else "links"
    by = f"{session.ranks} ranks, {session.transport}"
    doing.doing(f"round {number + 1} of {sizes.rounds}: {what}, {by}")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/meeting"
        ranks = range(session.ranks)
        return run_in_forks(partial(_measure_rank, k, session, sizes, file) for k in ranks)


def _measure_rank(rank: int, session: Session, sizes: ProbeSizes, file: str) -> OfRank:
    import torch.distributed as dist

    pin_to_core(rank, session.ranks)
    with meeting(rank, session.ranks, file, session.transport == SHARED) as links:
        dist.barrier()
        devices = device_times(sizes) if session.device else []
        moved = link_times(links, rank, range(session.ranks), sizes, session.transport == GLOO)
        dist.barrier()
        cores, pace = os.cpu_count() or 1, (sizes.pace_s, sizes.pace_rounds)
        paced = paces(rank, cores, *pace, dist.barrier) if session.paced else ()
    return OfRank(devices, moved, paced)


def with_ops(
    hardware: Hardware, recipes: Sequence[Recipe], steps: int = STEPS, rounds: int = ROUNDS
) -> Hardware:
    """Add to the profile `hardware` the times of the ops of some recipes.

    recipes: each trains for `steps` steps in each of `rounds` rounds.  Times of other shapes stay.
    """
    jobs, plain = [Job(recipe) for recipe in recipes], replace(hardware, ops={})
    times: TimeRatios = defaultdict(list)
    for _ in range(rounds):
        for job in jobs:
            for key, factors in _measure_job(job, plain, steps).items():
                times[key] += factors
    known = {target: dict(each) for target, each in hardware.ops.items()}
    for (target, shapes), factors in times.items():
        known.setdefault(target, {})[shapes] = calibrated.digits(median(factors))
    return replace(hardware, ops=known)


def _measure_job(job: Job, hardware: Hardware, steps: int) -> TimeRatios:
    """Measure the ops of a job in all processes."""
    plan = job.training.plan  # made before the processes fork

    def measure() -> TimeRatios:
        measure_alone()
        made = job.materials
        return measure_op_times(plan, made.sampler, made.initial, hardware, steps)

    found: TimeRatios = defaultdict(list)
    for each in run_in_forks([measure] * _BESIDE):
        for key, factors in each.items():
            found[key] += factors
    return found


def show_ops(hardware: Hardware, console: Console) -> None:
    """A line an op: how many shapes were timed, and how far off the rest of the profile is."""
    table = Table("op", "shapes", "measured / foreseen without", box=None)
    for target, known in sorted(hardware.ops.items()):
        least, most = min(known.values()), max(known.values())
        table.add_row(target, str(len(known)), f"{least:.2f} to {most:.2f}")
    console.print(table)
