"""The setting that every layout starts from: the recipe made concrete, and this rank's place; the
optimizer as a user of torch would make it, fused where torch has that.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from flowrun.engine.runtime.rank.readback import copy_to_device
from flowrun.launcher.bench.suite import Peer
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.optimizer import OF_TORCH
from flowrun.launcher.model.build import instantiate_model, task_inputs
from flowrun.launcher.recipe.schema import Optim

PeerBatch = Mapping[str, Tensor]
# one training step -> its loss, None where this rank has none
TrainStep = Callable[[], Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """job: data, loss and numbers.  rank, world: of all processes.  compiled: torch.compile
    is to be used.
    """

    job: Job
    peer: Peer
    rank: int
    world: int
    device: torch.device
    compiled: bool

    def model(self) -> nn.Module:
        """Make the recipe's model by plain torch, ready for the batches that the ranks read."""
        model = instantiate_model(self.job.recipe)
        task_inputs(self.job.recipe, model, self.job.materials.example)
        return model

    def batches(self, parts: int = 1, part: int = 0) -> Iterator[PeerBatch]:
        """Yield micro-batches; of each, number `part` of `parts` equal parts.

        Raises ValueError if a micro-batch cannot be divided so.
        """
        size = self.job.recipe.micro_batch_size
        if size % parts:
            raise ValueError(f"{size} samples cannot be divided over {parts} ranks")
        share = size // parts
        data = _MicroBatches(self.job, slice(part * share, (part + 1) * share))
        for batch in DataLoader(data, batch_size=None, num_workers=self.peer.workers):
            yield {name: copy_to_device(value, self.device) for name, value in batch.items()}

    def autocast(self) -> AbstractContextManager[None]:
        """Around forward and loss."""
        dtype = self.job.materials.task.autocast
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)


class _MicroBatches(Dataset[PeerBatch]):
    """Item k is micro-batch k of the run: `rows` of it."""

    def __init__(self, job: Job, rows: slice) -> None:
        self.sampler, self.rows = job.materials.sampler, rows
        self.micro_batches = job.recipe.train.micro_batches
        self.steps = job.recipe.train.steps

    def __len__(self) -> int:
        return self.steps * self.micro_batches

    def __getitem__(self, index: int) -> PeerBatch:
        return self.sampler(*divmod(index, self.micro_batches), self.rows)


def chosen(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Modules by name, in the order of the patterns; `*` stands for one part of a name.

    Raises ValueError for a pattern that names nothing.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        depth = pattern.count(".")
        hits = {
            name: module
            for name, module in model.named_modules()
            if name.count(".") == depth and fnmatch.fnmatchcase(name, pattern)
        }
        if not hits:
            raise ValueError(f"the model has no module {pattern!r}")
        found |= hits
    return found


def kind_of(optim: Optim) -> type[torch.optim.Optimizer]:
    """Return torch's own class of an optimizer.  Raises ValueError where torch has none."""
    found = OF_TORCH.get(optim.name)
    if found is None:
        raise ValueError(f"torch has no optimizer {optim.name}; there is {', '.join(OF_TORCH)}")
    return found


def arguments(optim: Optim, sparse: bool = False) -> dict[str, Any]:
    """Return the arguments of kind_of(optim).

    sparse: some gradients are sparse, which fused kernels do not take.  Raises ValueError for what
    a peer does not do, so that both sides do the same.
    """
    asked = ("clip_norm", "clip_value", "schedule", "warmup_steps", "groups", "ema", "update")
    for key in asked:
        if getattr(optim, key):
            raise ValueError(f"a peer of the bench knows no optim.{key}: switch it off")
    common: dict[str, object] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if not sparse:
        common["fused"] = True
    if optim.name == "adamw":
        return {**common, "betas": tuple(optim.betas), "eps": optim.eps}
    if optim.name == "adagrad":
        return {**common, "eps": optim.eps}
    return {**common, "momentum": optim.momentum, "nesterov": optim.nesterov}


def optimizer(
    optim: Optim, parameters: Iterable[nn.Parameter], sparse: bool = False
) -> torch.optim.Optimizer:
    """Make the recipe's optimizer for these parameters.

    optim: of the recipe.  sparse: some gradients are sparse.  Fused kernels take DTensors (which
    have a mesh) and plain tensors in groups of their own.
    """
    kept = [p for p in parameters if p.requires_grad]
    split = [p for p in kept if hasattr(p, "device_mesh")]
    whole = [p for p in kept if not hasattr(p, "device_mesh")]
    groups = [{"params": group} for group in (split, whole) if group]
    return kind_of(optim)(groups, **arguments(optim, sparse))


def train_loop(
    setting: Setting,
    model: Any,
    update: torch.optim.Optimizer | None = None,
    *,
    parts: int = 0,
    part: int = 0,
    cut: Callable[[PeerBatch], PeerBatch] | None = None,
) -> TrainStep:
    """Return a step: forward and backward of every micro-batch of the setting, with gradients
    summed over ranks in the last.

    update: the optimizer; None: the recipe's, over all parameters of the model.  parts, part: into
    which a micro-batch is divided, and this rank's; 0: one for each rank.  cut: takes this rank's
    part of each sample.
    """
    peer, task = setting.peer, setting.job.materials.task
    count = setting.job.recipe.train.micro_batches
    update = update or optimizer(setting.job.recipe.optim, model.parameters(), peer.sparse)
    batches = setting.batches(*((parts, part) if parts else (setting.world, setting.rank)))

    def measured(batch: PeerBatch) -> Tensor:
        with setting.autocast():
            return task.loss_of(task.output(batch, model), batch) / count

    if setting.compiled and peer.whole:
        measured = torch.compile(measured)

    def step() -> Tensor:
        update.zero_grad(set_to_none=True)
        losses = []
        for k in range(count):
            batch = cut(next(batches)) if cut else next(batches)
            with _sums(model, k == count - 1):
                loss = measured(batch)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        update.step()
        return torch.stack(losses).sum()

    return step


def _sums(model: Any, last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch: whether its backward sums gradients over the ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    waits = isinstance(model, DistributedDataParallel) and not last
    return model.no_sync() if waits else nullcontext()  # type: ignore[no-any-return]
