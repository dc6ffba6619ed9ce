"""A recipe trained by plain torch: autograd, torch.optim and torch.amp on one device, and nothing
of flowrun's engine.  `flowrun verify` compares the layouts with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowrun.engine.capture.update_trace import states_of, step_scalars_of
from flowrun.engine.ops.flow.update import FUSED
from flowrun.engine.passes.update.torch_update import TorchUpdate
from flowrun.engine.strategy import LossScale, Optimizer
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.materials import make_task
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.recipe.recipe import Recipe


@dataclass(frozen=True)
class Trained:
    """losses: of each step.  before, after: weights by name.  skipped: steps whose update loss
    scaling left out.
    """

    losses: tuple[float, ...]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    skipped: frozenset[int] = frozenset()


def plain_loop(
    recipe: Recipe, replicas: int = 1, skipped: frozenset[int] = frozenset(), *, whole: bool = False
) -> Trained:
    """Train the recipe, micro-batch by micro-batch.

    whole: each step's batch in one piece.  replicas: of the mirrored view: each has its own part of
    a micro-batch and its own buffers; their gradients are averaged.  skipped: steps that shall have
    no update.
    """
    job = Job(recipe, values=False)
    recipe = job.recipe
    model = instantiate_model(recipe).train()
    task = make_task(recipe, model, job.materials.example)
    models = [model, *(_replica(model) for _ in range(replicas - 1))]
    parameters = task.parameters
    before = {name: p.detach().clone() for name, p in parameters.items()}
    update = _PlainUpdate(job.strategy.optimizer, job.strategy.loss_scale, parameters)
    train, parts = recipe.train, 1 if whole else recipe.train.micro_batches
    sampler = replace(job.materials.sampler, micro_batches=parts)
    rows = train.batch_size // parts // replicas
    losses = []
    for step in range(train.steps):
        update.zero_grad()
        total = 0.0
        for micro_batch in range(parts):
            for rank, each in enumerate(models):
                batch = sampler(step, micro_batch, slice(rank * rows, (rank + 1) * rows))
                with task.precision():
                    loss = task.loss_of(task.output(batch, each), batch).float()
                loss = loss / (parts * replicas)
                update.backward(loss)
                total += loss.item()
        if step not in skipped and not update.step(step):
            skipped |= {step}
        losses.append(total)
    after = {name: p.detach() for name, p in parameters.items()}
    return Trained(tuple(losses), before, after, skipped)


def _replica(model: nn.Module) -> nn.Module:
    """The same parameters, whose gradients then add up, and buffers of its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


_TorchGroup = dict[str, Any]  # of an optimizer: parameters and numbers
_UNTIL = "frozen_until"


class _PlainUpdate:
    """The update of a step by plain torch: scaling, clipping, rates, and torch's own optimizer or
    the function that the recipe names.
    """

    def __init__(
        self, asked: Optimizer, scale: LossScale | None, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.asked = asked
        self.optimizers = _optimizers(asked, parameters)
        self.groups = [group for each in self.optimizers for group in each.param_groups]
        self.rates = [float(group["lr"]) for group in self.groups]
        self.constant = scale.start if scale and not scale.dynamic else None
        start = scale.start if scale else 1.0
        self.scaler = torch.amp.GradScaler("cpu", start, enabled=scale is not None)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, step: int) -> bool:
        """Change the weights; False if a gradient has left its range.  step: counted from 0."""
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        for group in (group for group in self.groups if step < group[_UNTIL]):
            group["params"][0].grad = None
        gradients = [p for group in self.groups for p in group["params"] if p.grad is not None]
        scaled = self.scaler.is_enabled()
        finite = not scaled or all(bool(p.grad.isfinite().all()) for p in gradients)
        if self.asked.clip_value:
            nn.utils.clip_grad_value_(gradients, self.asked.clip_value)
        if self.asked.clip_norm:
            nn.utils.clip_grad_norm_(gradients, self.asked.clip_norm)
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = self.asked.rate(rate, step)
        for optimizer in self.optimizers if finite else ():
            self.scaler.step(optimizer)
        self.scaler.update(self.constant)
        return finite


def _optimizers(
    asked: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Make an optimizer for each update, with a group for each parameter: each may have settings of
    its own.
    """
    groups: dict[object, list[_TorchGroup]] = {}
    for name, p in parameters.items():
        if p.requires_grad:
            update = asked.update_of(name)
            settings: _TorchGroup = {"params": [p], **dict(update.settings)}
            settings[_UNTIL] = asked.frozen_until(name)
            if not update.function and "beta1" in settings:
                settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
            groups.setdefault(update.function or update.name, []).append(settings)
    return [_optimizer(by, given) for by, given in groups.items()]


def _optimizer(by: object, groups: list[_TorchGroup]) -> torch.optim.Optimizer:
    if isinstance(by, str):
        return FUSED[by].kind(groups, lr=1.0)  # type: ignore[call-arg]
    if isinstance(by, TorchUpdate):
        return by.kind(groups, **_TorchGroup(by.numbers))
    return _ByFunction(groups, cast("Callable[..., Sequence[Tensor]]", by))


class _ByFunction(torch.optim.Optimizer):
    """The update that a function describes (docs/how_to/training.md), run on whole tensors."""

    def __init__(
        self, groups: list[_TorchGroup], function: Callable[..., Sequence[Tensor]]
    ) -> None:
        super().__init__(groups, {})
        self.function = function

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Change every weight that has a gradient."""
        for group in self.param_groups:
            p = group["params"][0]
            if p.grad is not None:
                self._change(
                    p,
                    {k: v for k, v in group.items() if k not in ("params", "lr", _UNTIL)},
                    group["lr"],
                )

    def _change(self, p: Tensor, numbers: dict[str, object], rate: float) -> None:
        state = self.state[p]
        if not state:
            starts = [state.start for state in states_of(self.function, tuple(p.shape))]
            state["states"] = [p.clone() if s is None else torch.full_like(p, s) for s in starts]
            state["step"] = 0
        state["step"] += 1
        fed = {"lr": torch.tensor(rate), "step": torch.tensor(float(state["step"]))}
        fed = {key: fed[key] for key in step_scalars_of(self.function)}
        new, *state["states"] = self.function(p.clone(), p.grad, *state["states"], **numbers, **fed)
        p.copy_(new)
