"""The recipe's optimizer as a user of torch would make it: fused where torch has that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flowrun.launcher.recipe.schema import Optim

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


def arguments(optim: Optim, sparse: bool = False) -> dict[str, Any]:
    """Return the arguments of the class KINDS[optim.name].

    sparse: some gradients are sparse, which fused kernels do not take.  Raises ValueError for what
    a peer does not do, so that both sides do the same.
    """
    asked = ("clip_norm", "clip_value", "schedule", "warmup_steps", "groups", "ema", "update")
    for key in asked:
        if getattr(optim, key):
            raise ValueError(f"a peer of the bench knows no optim.{key}: switch it off")
    if optim.name not in KINDS:
        raise ValueError(f"torch has no optimizer {optim.name}; there is {', '.join(KINDS)}")
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
    return KINDS[optim.name](groups, **arguments(optim, sparse))
