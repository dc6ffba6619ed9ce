"""Data parallel layouts: all ranks have a part of the batch; under ZeRO they share the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flowrun.launcher.bench.peers.setting import (
    Setting,
    TrainStep,
    arguments,
    chosen,
    kind_of,
    train_loop,
)


def single(setting: Setting) -> TrainStep:
    """A plain loop."""
    return train_loop(setting, _prepare(setting))


def ddp(setting: Setting) -> TrainStep:
    """DistributedDataParallel, gradients as views of its buckets."""
    return train_loop(setting, _distribute(setting))


def zero1(setting: Setting) -> TrainStep:
    """DistributedDataParallel, the optimizer's state sharded."""
    model, optim = _distribute(setting), setting.job.recipe.optim
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), kind_of(optim), parameters_as_bucket_view=True, **arguments(optim)
    )
    return train_loop(setting, model, sharded)


def fsdp2(setting: Setting) -> TrainStep:
    """fully_shard: of every unit, then of what is left."""
    model = _prepare(setting)
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    dtype = setting.job.materials.task.autocast
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for unit in (*chosen(model, setting.peer.units).values(), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return train_loop(setting, model)


def _distribute(setting: Setting) -> DistributedDataParallel:
    return DistributedDataParallel(_prepare(setting), gradient_as_bucket_view=True)


def _prepare(setting: Setting) -> nn.Module:
    """Make the model as the peer wants it, before it is wrapped."""
    model = setting.model().to(setting.device).train()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and setting.peer.sparse:
            module.sparse = True
    for module in chosen(model, setting.peer.recompute).values():
        _checkpoint(module)
    if setting.compiled and not setting.peer.whole:
        model.compile()
    return model


def _checkpoint(module: nn.Module) -> None:
    """Compute the activations of this module again in backward."""
    forward = module.forward

    def again(*inputs: object, **named: Any) -> object:
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    module.forward = again  # type: ignore[method-assign]
