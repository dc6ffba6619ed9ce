"""One rank, DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2: every rank has all layers
and its part of the batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from flowrun.launcher.bench.peers.optimizer import KINDS, arguments, optimizer
from flowrun.launcher.bench.peers.setting import Setting, Step, chosen
from flowrun.launcher.job import AUTOCAST


def single(setting: Setting) -> Step:
    """A plain loop."""
    model = _prepared(setting)
    return _loop(setting, model, _optimizer(setting, model))


def ddp(setting: Setting) -> Step:
    """DistributedDataParallel, gradients as views of its buckets."""
    model = DistributedDataParallel(_prepared(setting), gradient_as_bucket_view=True)
    return _loop(setting, model, _optimizer(setting, model))


def zero1(setting: Setting) -> Step:
    """The same, the optimizer's state sharded."""
    model = DistributedDataParallel(_prepared(setting), gradient_as_bucket_view=True)
    optim = setting.job.recipe.optim
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), KINDS[optim.name], parameters_as_bucket_view=True, **arguments(optim)
    )
    return _loop(setting, model, sharded)


def fsdp2(setting: Setting) -> Step:
    """fully_shard: of every unit, then of what is left."""
    model = _prepared(setting)
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    dtype = AUTOCAST[setting.job.recipe.precision.dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for unit in chosen(model, setting.peer.units).values():
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _loop(setting, model, _optimizer(setting, model))


def _prepared(setting: Setting) -> nn.Module:
    """The model as the peer wants it, before it is wrapped."""
    model = setting.job.model.to(setting.device).train()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and setting.peer.sparse:
            module.sparse = True
    for module in chosen(model, setting.peer.recompute).values():
        _checkpointed(module)
    if setting.compiled:
        model.compile()
    return model


def _checkpointed(module: nn.Module) -> None:
    """Activations of this module are computed again in backward."""
    from torch.utils.checkpoint import checkpoint

    forward = module.forward

    def again(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    module.forward = again  # type: ignore[method-assign]


def _optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return optimizer(setting.job.recipe.optim, model.parameters(), setting.peer.sparse)


def _loop(setting: Setting, model: Any, update: torch.optim.Optimizer) -> Step:
    """Forward and backward of every micro-batch, gradients summed over ranks with the last."""
    batches, count = setting.batches(setting.world, setting.rank), setting.micro_batches

    def step() -> float:
        update.zero_grad(set_to_none=True)
        losses = []
        for k in range(count):
            batch = next(batches)
            with _sums(model, k == count - 1):
                with setting.autocast():
                    loss = setting.loss(setting.output(model, batch), batch) / count
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        update.step()
        return float(torch.stack(losses).sum())

    return step


def _sums(model: Any, last: bool) -> Any:
    """Around a micro-batch: whether its backward sums gradients over the ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    waits = isinstance(model, DistributedDataParallel) and not last
    return model.no_sync() if waits else nullcontext()
