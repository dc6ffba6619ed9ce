"""dry_acts: on CUDA each region acts once before anything is sent.

A kernel is loaded at its first launch, and libraries make what they need at their first call.  Both
may wait for all that runs on the device: for a message that waits there for its sender, which may
wait for this rank.  So what a step calls has been called before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.actors.sums import sums_of
from flowrun.engine.runtime.kernels.kernels import Kernel
from flowrun.engine.runtime.kernels.region_program import local_shape, regions_of


@torch.no_grad()
def act_dry(
    plan: Plan,
    rank: int,
    kernels: Mapping[int, Kernel],
    fields: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Run each region of a rank, with and without sums of earlier micro-batches.

    fields: of the batch, as kernels check them; all else are zeros, variables too.
    """

    made: dict[str, torch.Tensor] = {}  # as kernels of this device make it, without memory

    def zeros(name: str) -> torch.Tensor:
        if name not in made:
            shape, dtype = local_shape(plan, rank, name), plan.tensors[name].dtype
            return torch.zeros(shape, dtype=dtype, device=device)
        like = made[name]
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return empty.zero_()

    for actor, work in regions_of(plan, rank):
        sums = sums_of(plan, work)
        for begins in (True, False) if sums else (True,):
            values = [fields[name] if name in fields else zeros(name) for name in work.reads]
            before = [None if begins else zeros(name) for name in sums]
            results = kernels[actor]([*values, *before])  # type: ignore[list-item]
            made |= {k: x.to("meta") for k, x in zip(work.makes, results, strict=False)}
