"""DTensor's tensor parallelism: columns, then rows, and classes split through the loss."""

from __future__ import annotations

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

from flowrun.launcher.bench.peers.setting import Setting, TrainStep, chosen, train_loop


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
    step = train_loop(setting, model, parts=peer.data, part=mesh.get_local_rank("data"))

    def step_by_classes() -> Tensor | None:
        with loss_parallel():
            loss = step()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return step_by_classes
