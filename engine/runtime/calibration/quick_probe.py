"""quick_probe: the speeds of this machine as parts of those of the profile `cpu`, in a second.

Two processes of one thread measure at once, while others run: so compute counts by the clock of its
core, and of messages the quickest eighth.  What they find is kept for this processor and torch;
flowrun calibrate measures a whole profile.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.own_files import Unusable, cache_folder, own_folder, read_own, write_own
from flowrun.engine.runtime.calibration.calibrated import with_device
from flowrun.engine.runtime.calibration.calibration import (
    ProbeSizes,
    device_times,
    meeting,
    time_messages,
)
from flowrun.engine.runtime.kernels.cpu.products import read_cpuinfo

RANKS = 2
_FLOP = 1e8  # of a product by which speeds are compared
_PRODUCTS = (128, 128, 384), (512, 256, 512)
_SIZES = ProbeSizes(_PRODUCTS, ("fp32",), 1 << 24, (1 << 12,), 8, counted=1 / 8, probes=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The speeds of this machine, as parts of a profile's; date: of the measurement.

    products: of matrices.  memory: of streams, and of ops on elements.  starts: of ops and acts.
    messages: between ranks.
    """

    date: str
    products: float
    memory: float
    starts: float
    messages: float

    def __str__(self) -> str:
        return ", ".join(f"{name} x{x:.2g}" for name, x in asdict(self).items() if name != "date")

    def of(self, hardware: Hardware) -> Hardware:
        """Return the profile of this machine."""
        scaled = hardware.scale(self.products, self.memory, self.starts)
        levels = (replace(k, latency_s=k.latency_s / self.messages) for k in hardware.levels)
        return replace(scaled, levels=tuple(levels))


def file_of(base: Hardware) -> Path:
    """Return where the measurement of this machine against `base` is kept."""
    cpu = [read_cpuinfo(name) for name in ("model name", "cpu family", "model\t", "stepping")]
    about = repr((base, cpu, os.cpu_count(), torch.__version__))
    return cache_folder() / f"probe-{hashlib.sha256(about.encode()).hexdigest()[:32]}"


def read_scales(base: Hardware) -> Scales | None:
    """Return the measurement of this machine that is kept."""
    with suppress(OSError, Unusable, ValueError, TypeError):
        return Scales(**json.loads(read_own(file_of(base))))
    return None


def keep_scales(base: Hardware, scales: Scales) -> Scales:
    """Keep a measurement of this machine, if that can be, and return it."""
    with suppress(OSError, Unusable):
        own_folder(cache_folder())
        write_own(file_of(base), json.dumps(asdict(scales)).encode())
    return scales


def measure(rank: int, file: str, base: Hardware) -> Scales:
    """Measure this machine, in a process of its own that is one of RANKS.

    file: by which they meet; it is not there yet.
    """
    level = base.levels[0]
    with meeting(rank, RANKS, file) as links:
        [message] = time_messages(links, rank, replace(_SIZES, trials=160))
        found = with_device(base, device_times(_SIZES))
    return Scales(
        date=time.strftime("%Y-%m-%d"),
        products=base.fp32.seconds(_FLOP) / found.fp32.seconds(_FLOP),
        memory=found.memory_bytes_per_s / base.memory_bytes_per_s,
        starts=base.op_s / found.op_s,
        messages=(level.latency_s + message.sent_bytes / level.bytes_per_s) / message.seconds,
    )
