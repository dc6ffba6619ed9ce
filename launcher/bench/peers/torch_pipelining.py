"""torch.distributed.pipelining: the units of the model in stages, under any of its schedules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from flowrun.engine.torch_internals import set_donated_buffer
from flowrun.launcher.bench.peers.setting import PeerBatch, Setting, TrainStep, chosen, optimizer

ONE_STAGE = ("1F1B", "GPipe")  # schedules with one stage a rank; all others have two
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # whose last stage is on the first rank


def pipeline(setting: Setting) -> TrainStep:
    """The peer's schedule over stages of consecutive units."""
    peer, job, task = setting.peer, setting.job, setting.job.materials.task
    count = job.recipe.train.micro_batches
    units = list(chosen(setting.model(), peer.units).values())
    homes = stage_ranks(peer.schedule, setting.world)
    cut = peer.cut or best_cut([products(unit) for unit in units], homes)
    bounds = list(pairwise((0, *cut, len(units))))
    mine = [stage for stage, rank in enumerate(homes) if rank == setting.rank]
    modules = [_UnitStage(setting, units[slice(*bounds[stage])]) for stage in mine]
    stages = [
        pipelining.PipelineStage(module, stage, len(homes), setting.device)
        for stage, module in zip(mine, modules, strict=True)
    ]
    kind = getattr(pipelining, f"Schedule{peer.schedule}")
    schedule = kind(
        stages[0] if peer.schedule in ONE_STAGE else stages,
        count,
        loss_fn=lambda output, target: task.loss_of(output, {_target(setting): target}),
    )
    update = optimizer(job.recipe.optim, (p for module in modules for p in module.parameters()))
    batches = setting.batches()
    first, last = homes[0] == setting.rank, homes[-1] == setting.rank

    def step() -> Tensor | None:
        update.zero_grad(set_to_none=True)
        batch = _join([next(batches) for _ in range(count)])
        inputs = [batch[name] for name in task.inputs.values()] if first else []
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": batch[_target(setting)], "losses": losses}
        schedule.step(*inputs, **(given if last else {}))
        update.step()
        return torch.stack(losses).mean() if last else None

    return step


class _UnitStage(nn.Module):
    """Units one after the other, in the recipe's precision."""

    def __init__(self, setting: Setting, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units = nn.Sequential(*units).to(setting.device).train()
        self.setting = setting
        if setting.compiled:
            # zero-bubble schedules go backward twice, for inputs and for weights: torch says that
            # compiled code must then keep its buffers
            set_donated_buffer(setting.peer.schedule in ONE_STAGE)
            self.units.compile()

    def forward(self, x: Tensor) -> Tensor:
        with self.setting.autocast():
            return self.units(x)  # type: ignore[no-any-return]


def stage_ranks(schedule: str, world: int) -> list[int]:
    """The rank of every stage: one a rank, two in a loop, or two there and back."""
    there = list(range(world))
    if schedule in ONE_STAGE:
        return there
    return there + (there[::-1] if schedule in V_SHAPED else there)


def best_cut(work: Sequence[float], homes: Sequence[int]) -> tuple[int, ...]:
    """First unit of each later stage, so that the busiest rank has least to do, and then the
    largest stage.

    work: of every unit in order.  homes: the rank of every stage.  Raises ValueError if there are
    fewer units than stages.
    """

    def cost(cut: tuple[int, ...]) -> tuple[float, float]:
        sizes = [sum(work[a:b]) for a, b in pairwise((0, *cut, len(work)))]
        ranks = [sum(s for s, r in zip(sizes, homes, strict=True) if r == rank) for rank in homes]
        return max(ranks), max(sizes)

    cuts = list(combinations(range(1, len(work)), len(homes) - 1))
    if not cuts:
        raise ValueError(f"{len(work)} units cannot be cut into {len(homes)} stages")
    return min(cuts, key=cost)


def products(unit: nn.Module) -> float:
    """Work of a unit: elements of the weights that it multiplies with."""
    layers = (m for m in unit.modules() if not isinstance(m, nn.Embedding))
    return sum(p.numel() for m in layers for p in m.parameters(recurse=False) if p.dim() > 1)


def _target(setting: Setting) -> str:
    """The one field of the batch that the loss reads."""
    return str((setting.job.recipe.task.loss or {}).get("target", "targets"))


def _join(batches: Sequence[PeerBatch]) -> PeerBatch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
