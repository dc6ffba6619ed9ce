"""Hardware: the few numbers that turn work into seconds.  One profile serves inference, bucket
sizes and the rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What joins ranks.  latency_s: seconds before the first byte of one collective or message;
    bytes_per_s: of one rank.
    """

    latency_s: float = 150e-6
    bytes_per_s: float = 1.5e9


@dataclass(frozen=True, slots=True)
class Hardware:
    """A rank's device and its links.

    flops: per second, of large matrix products in fp32; a multiply-add counts 2.
    bf16_flops, fp16_flops: the same in bf16 and fp16; 0 means as in fp32.
    memory_bytes_per_s: streaming reads plus writes.
    act_s: overhead of one act of an actor.
    memory_bytes: of one rank; 0 means not limited.
    link: of ranks that torch.distributed joins.  shared_link: of ranks that share memory.
    """

    name: str = "cpu"
    flops: float = 1.1e11
    bf16_flops: float = 0.0
    fp16_flops: float = 0.0
    memory_bytes_per_s: float = 2.5e10
    act_s: float = 80e-6
    memory_bytes: int = 0
    link: Link = Link()
    shared_link: Link = Link(70e-6, 4e9)
