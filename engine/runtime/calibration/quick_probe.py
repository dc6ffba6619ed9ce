"""quick_probe: the speeds of this machine as parts of those of the profile `cpu`, in a second.

Two processes of one thread measure at once, while others run: so compute counts by the clock of its
core, and of messages the quickest eighth.  What they find is kept for this processor and torch;
flowrun calibrate measures a whole profile.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import torch

from flowrun.engine.hardware.hardware import AttentionSpeed, Hardware
from flowrun.engine.ir.own_files import Unusable, cache_folder, own_folder, read_own, write_own
from flowrun.engine.runtime.calibration.calibrated import with_device
from flowrun.engine.runtime.calibration.calibration import (
    FEW,
    FEW_HEADS,
    ProbeSizes,
    device_times,
    meeting,
    time_messages,
)
from flowrun.engine.runtime.kernels.cpu.products import read_cpuinfo

RANKS = 2
_PRODUCT = 512, 256, 384  # tokens, in, out
_FLOP = 2.0 * math.prod(_PRODUCT)
_SIZES = ProbeSizes(
    products=(_PRODUCT,),
    dtypes=("fp32",),
    stream_bytes=1 << 22,
    moved_bytes=(1 << 12,),
    trials=8,
    few=True,
    product_sets=8,
)
_MESSAGES = replace(_SIZES, trials=160, counted=1 / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The speeds of this machine, as parts of a profile's; date: of the measurement.

    products: of matrices.  convolutions: of theirs.  attention, long_attention: of 64 and of 512
    keys.  memory: of streams.  elements: of ops that compute for each element.  starts: of ops and
    acts.  messages: between ranks.
    """

    date: str
    products: float
    convolutions: float
    attention: float
    long_attention: float
    memory: float
    elements: float
    starts: float
    messages: float

    def __str__(self) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} x{x:.2g}"
            for name, x in asdict(self).items()
            if name != "date"
        )

    def of(self, hardware: Hardware) -> Hardware:
        """Return the profile of this machine."""
        scaled = hardware.scale(self.products, self.memory, self.elements, self.starts)
        each = (self.attention, self.long_attention)
        shares = tuple(hardware.attention_share * speed / self.products for speed in each)
        keys = tuple(float(keys) for _, keys in FEW_HEADS)
        return replace(
            scaled,
            convolution_share=hardware.convolution_share * self.convolutions / self.products,
            attention_share=1.0,
            attention=(AttentionSpeed(keys=keys, forward=shares, backward=shares),),
            levels=tuple(
                replace(k, latency_s=k.latency_s / self.messages) for k in hardware.levels
            ),
        )


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
        [message] = time_messages(links, rank, _MESSAGES)
        os.nice(19)  # the launcher plans at the same time
        found = with_device(base, device_times(_SIZES))
    usual = base.fp32.flops * base.attention_share
    attention, long_attention = (_attention_speed(found, *head) / usual for head in FEW_HEADS)
    return Scales(
        date=time.strftime("%Y-%m-%d"),
        products=sum(_product_seconds(base)) / sum(_product_seconds(found)),
        convolutions=_convolution_speed(found) / _convolution_speed(base),
        attention=attention,
        long_attention=long_attention,
        memory=found.memory_bytes_per_s / base.memory_bytes_per_s,
        elements=geometric_mean(found.elements_per_s[op] / base.elements_per_s[op] for op in FEW),
        starts=base.op_s / found.op_s,
        messages=(level.latency_s + message.sent_bytes / level.bytes_per_s) / message.seconds,
    )


def _product_seconds(hardware: Hardware) -> Iterator[float]:
    """Yield those of a linear layer and of both its gradients."""
    for share in (1.0, hardware.backward_share, hardware.weight_grad_share):
        yield hardware.fp32.seconds(_FLOP) / share


def _convolution_speed(hardware: Hardware) -> float:
    return hardware.convolution_share / hardware.fp32.seconds(_FLOP)


def _attention_speed(hardware: Hardware, width: int, keys: int) -> float:
    """Return that of causal attention, forward and backward."""
    forward, backward = (hardware.attention_speed(width, keys, backward=b) for b in (False, True))
    return hardware.fp32.flops * 14 / (4 / forward + 10 / backward)
