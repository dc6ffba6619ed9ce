"""A model next to a frozen one that sees the same: a teacher (distillation), or itself as it began
(preferences).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrun.engine.errors import ArgumentError
from flowrun.models.losses import part_of


class WithReference(nn.Module):
    """x -> what a model and a frozen one make of it: {model, reference}.

    Both read x alone, as it is; of token ids (B, …, T) in more than two dims, such as pairs, they
    read the rows (…, T), and make logits (B, …, T, V).
    reference: None: a copy of the model as it begins.  file: the reference's weights, as a run
    leaves them (weights.safetensors); a copied model begins with them, too.
    """

    def __init__(
        self, model: nn.Module, reference: nn.Module | None = None, file: str | None = None
    ) -> None:
        super().__init__()
        if file is not None:
            if not Path(file).is_file():
                raise ArgumentError("file", f"there is no file {file}.")
            (reference or model).load_state_dict(load_file(file))
        self.model, self.reference = model, reference or copy.deepcopy(model)
        self.reference.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.reference.eval()  # it drops nothing out
        return self

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        groups = tokens.dim() > 2 and not tokens.is_floating_point()
        rows = tokens.flatten(0, -2) if groups else tokens
        with torch.no_grad():
            reference = part_of(self.reference(rows), None)
        made = {"model": part_of(self.model(rows), None), "reference": reference}
        shape = tokens.shape[:-1]
        return {k: x.unflatten(0, shape) for k, x in made.items()} if groups else made
