"""A single rank, and DistributedDataParallel: every rank has all layers, a part of the batch."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from flowrun.launcher.bench.peers.setting import Setting, TrainStep
from flowrun.launcher.bench.peers.training_loop import loop, prepare


def single(setting: Setting) -> TrainStep:
    """A plain loop."""
    model = prepare(setting)
    return loop(setting, model)


def ddp(setting: Setting) -> TrainStep:
    """DistributedDataParallel, gradients as views of its buckets."""
    model = DistributedDataParallel(prepare(setting), gradient_as_bucket_view=True)
    return loop(setting, model)
