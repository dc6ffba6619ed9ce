"""Items of several lengths, and a net that sees their padding; a test writes this file beside its
recipe.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LONGEST = 16


class Texts(Dataset[dict[str, Tensor]]):
    """extra: dims of a field as long as the longest item that is not padding."""

    def __init__(self, samples: int = 60, extra: int = 0) -> None:
        some = {0: LONGEST - 4, 1: 5}  # of each twelve items one is long, and one not short
        self.lengths = [some.get(k % 12, 1) + k % 4 + k % 2 for k in range(samples)]
        self.extra = extra

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.lengths[index]
        tokens = torch.arange(1, length + 1) * (index + 1) % 23 + 1
        item = {"tokens": F.pad(tokens, (0, LONGEST - length)), "label": torch.tensor(index % 5)}
        more = (
            {"extra": torch.arange(LONGEST).expand((LONGEST,) * self.extra)} if self.extra else {}
        )
        return {**item, **more}


class Pooled(nn.Module):
    """Logits (B, 5) of the mean over all tokens, of padding, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))).mean(1))
