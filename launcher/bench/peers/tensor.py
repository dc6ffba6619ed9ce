"""DTensor's tensor parallelism: columns, then rows, and classes split through the loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from flowrun.launcher.bench.peers.setting import Setting, TrainStep, chosen, optimizer, sums


def tensor(setting: Setting) -> TrainStep:
    """parallelize_module by the peer's patterns, and FSDP2 over the ranks that divide the batch."""
    model, peer = setting.model().to(setting.device).train(), setting.peer
    shape = (peer.data, setting.world // peer.data)
    mesh = init_device_mesh(setting.device.type, shape, mesh_dim_names=("data", "tensor"))
    plan: dict[str, ParallelStyle] = {n: ColwiseParallel() for n in chosen(model, peer.columns)}
    plan |= {name: RowwiseParallel() for name in chosen(model, peer.rows)}
    if peer.classes:
        plan[peer.classes] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tensor"], plan)
    if peer.data > 1:
        for unit in chosen(model, peer.units).values():
            fully_shard(unit, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    if setting.compiled:
        model.compile()
    update = optimizer(setting.job.recipe.optim, model.parameters())
    batches, count = setting.batches(peer.data, mesh.get_local_rank("data")), setting.micro_batches

    def step() -> Tensor:
        update.zero_grad(set_to_none=True)
        losses = []
        for k in range(count):
            batch = next(batches)
            with loss_parallel(), sums(model, k == count - 1):
                with setting.autocast():
                    loss = setting.loss(setting.output(model, batch), batch) / count
                loss.backward()  # type: ignore[no-untyped-call]
            value = loss.detach()
            losses.append(value.full_tensor() if isinstance(value, DTensor) else value)
        update.step()
        return torch.stack(losses).sum()

    return step
