"""ZeroRedundancyOptimizer and FSDP2: data parallel, what a rank need not hold is sharded."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from flowrun.launcher.bench.peers.setting import Setting, TrainStep, chosen
from flowrun.launcher.bench.peers.torch_optimizer import KINDS, arguments
from flowrun.launcher.bench.peers.training_loop import loop, prepare
from flowrun.launcher.job.recipe_strategy import AUTOCAST


def zero1(setting: Setting) -> TrainStep:
    """DistributedDataParallel, the optimizer's state sharded."""
    model = DistributedDataParallel(prepare(setting), gradient_as_bucket_view=True)
    optim = setting.job.recipe.optim
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), KINDS[optim.name], parameters_as_bucket_view=True, **arguments(optim)
    )
    return loop(setting, model, sharded)


def fsdp2(setting: Setting) -> TrainStep:
    """fully_shard: of every unit, then of what is left."""
    model = prepare(setting)
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    dtype = AUTOCAST[setting.job.recipe.precision.dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for unit in chosen(model, setting.peer.units).values():
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return loop(setting, model)
