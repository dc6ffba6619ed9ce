"""Two answers to each prompt, of which one is preferred."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.collate import batch_of
from flowrun.launcher.data.corpus.packed import DocumentSamples
from flowrun.launcher.data.sampler import length
from flowrun.launcher.data.stacked import StackedDataset
from flowrun.models.losses import IGNORED


class Preferences(StackedDataset):
    """Items of two data sets, in pairs, the preferred first: {field (2, …)}.

    chosen, rejected: their items of one number belong together, as `Instructions` with two answers
    make them.  rejected: None: generated ones of a text: the first half of a window is a prompt,
    and the rest of the next window an answer that is not preferred.
    """

    def __init__(
        self, chosen: Dataset[dict[str, Tensor]], rejected: Dataset[dict[str, Tensor]] | None = None
    ) -> None:
        self.chosen, self.rejected = chosen, rejected
        for name, each in (("chosen", chosen), ("rejected", rejected or chosen)):
            items = rows = length(each)
            if isinstance(each, DocumentSamples):
                rows = len(each.documents.starts) - 1
            if (items, items) != (rows, length(chosen)):
                problem = f"it has {items} items of {rows} rows, and chosen {length(chosen)}."
                instead = "Leave no row out, and pack none, so that items of a number are a pair."
                raise ArgumentError(name, problem, instead)
        self.vocabulary = getattr(chosen, "vocabulary", None)
        self.ids_digest, self.notes = getattr(chosen, "ids_digest", None), ()

    def __len__(self) -> int:
        return length(self.chosen)

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items; of a text no target is in the prompt."""
        chosen = batch_of(self.chosen, indices)
        if self.rejected is not None:
            rejected = batch_of(self.rejected, indices)
        else:
            others = batch_of(self.chosen, (indices + 1) % len(self))
            half = chosen["tokens"].shape[1] // 2
            chosen["targets"] = chosen["targets"].clone()
            chosen["targets"][:, :half] = IGNORED
            rejected = {
                field: torch.cat([values[:, :half], others[field][:, half:]], 1)
                for field, values in chosen.items()
            }
        return {field: torch.stack([chosen[field], rejected[field]], 1) for field in chosen}
