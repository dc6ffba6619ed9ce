"""The training loop that data parallel layouts share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flowrun.launcher.bench.peers.setting import PeerBatch, Setting, TrainStep, chosen
from flowrun.launcher.bench.peers.torch_optimizer import optimizer


def prepare(setting: Setting) -> nn.Module:
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

    def again(*inputs: Any, **named: Any) -> object:
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    module.forward = again  # type: ignore[method-assign]


def loop(setting: Setting, model: Any, update: torch.optim.Optimizer | None = None) -> TrainStep:
    """Return a step: forward and backward of every micro-batch of the setting, with gradients
    summed over ranks in the last.

    update: the optimizer; None: the recipe's, over all parameters of the model.
    """
    update = update or optimizer(setting.job.recipe.optim, model.parameters(), setting.peer.sparse)
    batches, count = setting.batches(setting.world, setting.rank), setting.micro_batches

    def measured(batch: PeerBatch) -> Tensor:
        with setting.autocast():
            return setting.loss(setting.output(model, batch), batch) / count

    if setting.compiled and setting.peer.whole:
        measured = torch.compile(measured)

    def step() -> Tensor:
        update.zero_grad(set_to_none=True)
        losses = []
        for k in range(count):
            batch = next(batches)
            with sums(model, k == count - 1):
                loss = measured(batch)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        update.step()
        return torch.stack(losses).sum()

    return step


def sums(model: Any, last: bool) -> Any:
    """Around a micro-batch: whether its backward sums gradients over the ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    waits = isinstance(model, DistributedDataParallel) and not last
    return model.no_sync() if waits else nullcontext()
